"""Noise on text embeddings: of a sample's draw alone, as large as is asked, none in padding."""

import pytest
import torch

from datamodules.batch import stack_padded
from tests.support.objectives import latent_batch, losses
from tests.support.steps import family
from tests.support.tiny_adapters import build, learn

LENGTHS = {0: 5, 1: 16, 2: 9}


def prompt(module, draws):
    """Texts of different lengths, as a batch pads them."""
    [(name, shape), *_] = module.prompt_shapes(module.base.source.config(), "make it snow", [(32, 32)]).items()
    assert name == "prompt_embeds"
    texts = []
    for draw in draws:
        text = torch.randn(LENGTHS[draw], shape[-1], generator=torch.Generator().manual_seed(draw))
        texts.append({"prompt_embeds": text, "prompt_embeds_mask": torch.ones(LENGTHS[draw], dtype=torch.bool)})
    return stack_padded(texts)


@pytest.mark.parametrize("model", ["qwen_image_edit_plus"])
def test_noise_of_a_sample_does_not_depend_on_its_batch_and_leaves_padding(repositories, model):
    module = family(repositories, model, "objective.text.noise=0.4")
    together = prompt(module, [0, 1, 2])
    noisy = module.objective._noisy(together, [10, 11, 12])
    assert torch.equal(noisy["prompt_embeds_mask"], together["prompt_embeds_mask"])
    for row, draw in enumerate((0, 1, 2)):
        length = LENGTHS[draw]
        alone = module.objective._noisy(prompt(module, [draw]), [10 + draw])["prompt_embeds"][0]
        torch.testing.assert_close(noisy["prompt_embeds"][row, :length], alone, rtol=1e-5, atol=1e-6)
        assert not noisy["prompt_embeds"][row, length:].any()
        other = module.objective._noisy(prompt(module, [draw]), [20 + draw])["prompt_embeds"][0]
        assert not torch.equal(alone, other)


def test_its_standard_deviation_is_relative_to_the_embeddings(tiny):
    """Of each tensor of each sample, whatever the scale of the embeddings; they keep their dtype."""
    objective = build(tiny, "lora", "objective.text.noise=0.25").objective
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(3, 64, 128, generator=generator) * torch.tensor([0.1, 1.0, 30.0]).view(-1, 1, 1)
    given = {"prompt_embeds": text, "pooled_prompt_embeds": text[:, 0].bfloat16()}
    noisy = objective._noisy(given, [0, 1, 2])
    change, rms = (noisy["prompt_embeds"] - text).flatten(1), text.flatten(1).square().mean(dim=1).sqrt()
    torch.testing.assert_close(change.std(dim=1) / rms, torch.full((3,), 0.25), rtol=0.02, atol=0)
    assert (change.mean(dim=1) / rms).abs().max() < 0.01
    assert noisy["pooled_prompt_embeds"].dtype == torch.bfloat16
    assert not torch.equal(noisy["pooled_prompt_embeds"], given["pooled_prompt_embeds"])


def test_there_is_none_by_default_and_it_is_a_function_of_seed_and_draw(tiny):
    modules = {name: build(tiny, "lora", *more) for name, more in SETTINGS.items()}
    found = {}
    for name, module in modules.items():
        learn(module)
        found[name] = losses(module, latent_batch([3, 4]))
    assert torch.equal(found["default"], found["none"])
    assert not torch.equal(found["noise"], found["none"])
    assert torch.equal(found["noise"], losses(modules["noise"], latent_batch([3, 4])))
    given = {"prompt_embeds": torch.ones(1, 4, 8)}
    one, same, other = (
        modules[name].objective._noisy(given, [7])["prompt_embeds"] for name in ("noise", "noise", "another seed")
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


SETTINGS = {
    "default": [],
    "none": ["objective.text.noise=0"],
    "noise": ["objective.text.noise=0.5"],
    "another seed": ["objective.text.noise=0.5", "seed=1"],
}
