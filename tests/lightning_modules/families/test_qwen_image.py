"""Qwen-Image: sizes of condition images and lengths of prompts, as its pipelines have them."""

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from hydra.utils import instantiate

from datamodules.images.decoding import size_of_area
from datamodules.images.windows import ConditionImages
from lightning_modules.family import Sampling
from tests.support.commands import compose
from tests.support.references import PROMPTS, REFERENCES, condition_images, raw_sample


@pytest.mark.parametrize("size", [(1024, 1024), (640, 480), (1200, 300), (333, 1999), (16, 16)])
@pytest.mark.parametrize("area", [1024 * 1024, 384 * 384])
def test_sizes_are_the_pipelines(size, area):
    expected = pipeline_qwenimage_edit_plus.calculate_dimensions(area, size[0] / size[1])
    assert size_of_area(*size, area) == expected
    assert ConditionImages(vae_image_size=area).size(*size) == expected


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
@pytest.mark.slow
def test_edited_picture_equals_the_pipelines_at_their_own_sizes(name, repositories, tmp_path):
    """The autoencoder sees one megapixel, as in real predictions."""
    module = instantiate(
        compose("train", f"model={name}", f"model.pretrained_model_name_or_path={repositories[name]}").model,
        dtype="float32",
    )
    module.configure_model()
    stock = DiffusionPipeline.from_pretrained(repositories[name])
    images = condition_images([(90, 70)])
    expected = stock(
        image=images if name == "qwen_image_edit_plus" else images[0],
        prompt=PROMPTS[0],
        true_cfg_scale=1.0,
        num_inference_steps=2,
        width=64,
        height=48,
        output_type="pt",
        generator=torch.Generator().manual_seed(7),
    ).images
    encoded = module.encoder(raw_sample(module, images, tmp_path))
    own = module.sampler.sample(encoded, Sampling(2, None, 1.0, None), (64, 48), [7]) / 2 + 0.5
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prompt", [" ", "x" * 505, "long " * 130, "x" * 1100], ids=len)
def test_prompts_are_cut_as_in_the_pipeline(repositories, monkeypatch, prompt):
    reference = REFERENCES["qwen_image"]
    module, stock = (
        reference.build(repositories["qwen_image"]),
        reference.stock(repositories["qwen_image"], monkeypatch),
    )
    own = module.encode_prompt(module.base.components, prompt, [])
    embeds, mask = stock.encode_prompt(prompt, max_sequence_length=512)
    assert mask is None
    assert own["prompt_embeds_mask"].all()
    torch.testing.assert_close(own["prompt_embeds"], embeds[0], rtol=0, atol=1e-5)
    [count], _ = module.prompt_tokens(module.base.components, [prompt])
    assert min(count, 1024) == stock.encode_prompt(prompt)[0].shape[1]
