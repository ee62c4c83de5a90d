"""Parity with diffusers' FluxPipeline, tiny and in float32."""

import pytest
import torch
from diffusers import FluxPipeline
from hydra.utils import instantiate

from datamodules.batch import RawBatch
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.family import Sampling
from tests.support.commands import compose
from tests.support.same_adapters import randomize

PROMPT = "a cup of coffee, please"


@pytest.fixture
def repository(repositories):
    return repositories["flux_dev"]


@pytest.fixture
def module(repository):
    """The family's module, with an adapter whose both halves are random, alpha different from rank."""
    settings = [f"model.pretrained_model_name_or_path={repository}", "model.max_sequence_length=64"]
    cfg = compose("train", "model=flux_dev", "model.dtype=float32", *settings, "adapter.rank=4", "adapter.alpha=6")
    module = instantiate(cfg.model)
    module.configure_model()
    randomize(module.transformer)
    return module


@pytest.fixture
def stock(repository):
    pipeline = FluxPipeline.from_pretrained(repository)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_prompt_embeddings_equal_the_pipelines(module, stock):
    own = module.encode_prompt(module.base.components, PROMPT, [])
    embeds, pooled, _ = stock.encode_prompt(PROMPT, None, max_sequence_length=64)
    torch.testing.assert_close(own["prompt_embeds"], embeds[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(own["pooled_prompt_embeds"], pooled[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 48), (48, 80)])
@pytest.mark.parametrize("true_cfg_scale", [1.0, 3.0])
def test_picture_equals_the_pipelines(module, stock, tmp_path, size, true_cfg_scale):
    save_lora(module.adapter.updates(module.transformer), tmp_path / "pytorch_lora_weights.safetensors", {})
    arguments = {
        "prompt": PROMPT,
        "negative_prompt": "blurry" if true_cfg_scale > 1 else None,
        "true_cfg_scale": true_cfg_scale,
        "num_inference_steps": 5,
        "guidance_scale": 3.5,
        "width": size[0],
        "height": size[1],
        "max_sequence_length": 64,
        "output_type": "pt",
    }
    unadapted = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    stock.load_lora_weights(tmp_path)
    expected = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    sampling = Sampling(5, 3.5, true_cfg_scale, "blurry")
    encoded = module.encoder(RawBatch(["x"], [0], [PROMPT], None, []), module.sampling_rules.negative_prompt(sampling))
    own = module.sampler.sample(encoded, sampling, size, [7]) / 2 + 0.5
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)
    assert (expected - unadapted).abs().max() > 1e-2
