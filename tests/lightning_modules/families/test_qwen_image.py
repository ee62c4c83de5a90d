"""Qwen-Image: sizes of condition images and lengths of prompts, as its pipelines have them."""

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from datamodules.images.decoding import size_of_area
from datamodules.images.windows import ConditionImages
from tests.support.references import REFERENCES


@pytest.mark.parametrize("size", [(1024, 1024), (640, 480), (1200, 300), (333, 1999), (16, 16)])
@pytest.mark.parametrize("area", [1024 * 1024, 384 * 384])
def test_sizes_are_the_pipelines(size, area):
    expected = pipeline_qwenimage_edit_plus.calculate_dimensions(area, size[0] / size[1])
    assert size_of_area(*size, area) == expected
    assert ConditionImages(vae_image_size=area).size(*size) == expected


@pytest.mark.parametrize("prompt", [" ", "x" * 505, "long " * 130, "x" * 1100], ids=len)
def test_prompts_are_cut_as_in_the_pipeline(repositories, monkeypatch, prompt):
    reference, folder = REFERENCES["qwen_image"], repositories["qwen_image"]
    module, stock = reference.build(folder), reference.stock(folder, monkeypatch)
    own = module.encode_prompt(module.base.components, prompt, [])
    embeds, mask = stock.encode_prompt(prompt, max_sequence_length=512)
    assert mask is None
    assert own["prompt_embeds_mask"].all()
    torch.testing.assert_close(own["prompt_embeds"], embeds[0], rtol=0, atol=1e-5)
    [count], _ = module.prompt_tokens(module.base.components, [prompt])
    assert min(count, 1024) == stock.encode_prompt(prompt)[0].shape[1]


def test_embeddings_are_normalised_as_the_transformer_was_trained(repositories):
    """Qwen-Image-2.1's are not; transformers has changed what it returns as the last hidden state."""
    for name in ("qwen_image", "qwen_image_2_1"):
        module, seen = REFERENCES[name].build(repositories[name]), []
        norm = module.base.components["text_encoder"].base_model.language_model.norm
        with torch.no_grad():
            norm.register_forward_hook(lambda _, args, output, seen=seen: seen.append((args[0], output)))
            own = module.encode_prompt(module.base.components, "make it snow", [])["prompt_embeds"]
        before, after = (states[0, -len(own) :] for states in seen[0])
        expected, other = (after, before) if name == "qwen_image" else (before, after)
        torch.testing.assert_close(own, expected)
        assert (own - other).abs().max() > 1e-3
