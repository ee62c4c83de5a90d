"""Sliders: forwards with the update as it is, backwards with exchanged images and the opposite update."""

from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate

from datamodules.images.windows import ConditionImages
from foundation.errors import UserError
from lightning_modules.adapters.peft_layers import ADAPTER, get_weight, lora_layers
from lightning_modules.families.flux.module import FluxDev, FluxKontext
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.objectives import gradients, latent_batch, noised
from tests.support.steps import family, inputs
from tests.support.tiny_adapters import batch, build, learn

DRAWS = list(range(4))
SIZE = (32, 32)
SEES_IMAGES = SimpleNamespace(
    pipeline_name="QwenImageEditPlusPipeline", condition_images=ConditionImages(1, 1, condition_image_size=1024)
)


def made(tiny, adapter, *more):
    module = build(tiny, adapter, "objective=slider", *more)
    learn(module)
    return module


def negate(module):
    """Let the update be its opposite, by hand."""
    for layer in lora_layers(module.transformer, ADAPTER).values():
        layer.lora_B[ADAPTER].weight.data.neg_()


@pytest.mark.parametrize("adapter", ["lora", "tlora"])
def test_backward_samples_swap_images_and_negate_the_update(tiny, adapter):
    """Losses and gradients are compared with two plain modules, one with negated up projections."""
    module, forwards = (made(tiny, adapter, "model.vae_encode_mode=mode") for _ in range(2))
    backwards = made(tiny, adapter, "model.vae_encode_mode=mode")
    negate(backwards)
    latents = latent_batch(DRAWS)
    signs = module.objective.signs(DRAWS)
    assert set(signs.tolist()) == {1, -1}
    result = gradients(module, latents)
    given, [controls] = noised(module, latents), noised(module, latents).controls
    expected = []
    for row, sign in enumerate(signs):
        plain, one = (forwards, slice(row, row + 1)) if sign > 0 else (backwards, slice(row, row + 1))
        x0, control = (given.x0, controls) if sign > 0 else (controls, given.x0)
        x0, control, eps, t = (tensor[one] for tensor in (x0, control, given.eps, given.t))
        x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * eps
        prompt = {name: tensor[one] for name, tensor in given.prompt.items()}
        loss = (plain.denoise(x_t, t, [control], prompt) - (eps - x0)).square().mean()
        loss.backward()
        expected.append(loss.detach())
    torch.testing.assert_close(result["losses"], torch.stack(expected), rtol=1e-5, atol=1e-6)
    for name, layer in lora_layers(module.transformer, ADAPTER).items():
        one, other = (lora_layers(plain.transformer, ADAPTER)[name] for plain in (forwards, backwards))
        for half, sign in (("lora_A", 1), ("lora_B", -1)):  # what is negated by hand is so in its gradient
            own, plus, minus = (getattr(each, half)[ADAPTER].weight.grad for each in (layer, one, other))
            torch.testing.assert_close(own, plus + sign * minus, rtol=1e-4, atol=1e-6)


def test_an_orthogonal_update_is_turned_as_a_whole(tiny):
    """The update has a trainable part and one that cancels the start."""
    module = made(tiny, "ortho_tlora")
    x_t, controls, prompt = batch(2)
    t = torch.tensor([0.2, 0.7])
    with torch.no_grad():
        plain = module.denoise(x_t, t, controls, prompt)
        with module.denoise.turned(torch.tensor([1.0, -1.0])):
            turned = module.denoise(x_t, t, controls, prompt)
        for layer in lora_layers(module.transformer, ADAPTER).values():
            half = layer.lora_B[ADAPTER]
            half.inference_weight = -get_weight(half)
        opposite = module.denoise(x_t, t, controls, prompt)
    torch.testing.assert_close(turned, torch.stack([plain[0], opposite[1]]), rtol=1e-5, atol=1e-5)
    assert (plain - opposite).abs().max() > 1e-2


@pytest.mark.parametrize("model", first(1, ["flux_kontext", "flux2_klein_4b"]))
def test_signs_of_a_batch_are_those_of_its_single_samples(repositories, model):
    """Every layer of the supported transformers is adapted, including modulation."""
    module = family(repositories[model], model)
    x_t, t, controls, prompt = inputs(module)

    def velocity(rows, signs):
        prompts = {name: tensor[rows] for name, tensor in prompt.items()}
        with module.denoise.turned(torch.tensor(signs)):
            return module.denoise(x_t[rows], t[rows], [control[rows] for control in controls], prompts)

    with torch.no_grad():
        together = velocity([0, 1], [1.0, -1.0])
        for row, sign in ((0, 1.0), (1, -1.0)):
            torch.testing.assert_close(together[[row]], velocity([row], [sign]), rtol=1e-4, atol=1e-4)
        assert (velocity([1], [1.0]) - together[[1]]).abs().max() > 1e-2
        plain = module.denoise(x_t, t, controls, prompt)
        assert torch.equal(plain, velocity([0, 1], [1.0, 1.0])), "what is turned stays so for its forward alone"


def test_direction_of_a_draw_is_a_function_of_seed_and_number(tiny):
    signs, other = (made(tiny, "lora", f"seed={seed}").objective.signs for seed in (1, 2))
    many = list(range(1000))
    assert torch.equal(signs(many)[[7, 3]], signs([7, 3]))
    assert set(signs(many).tolist()) == {1, -1}
    assert signs(many).mean().abs() < 0.1
    assert not torch.equal(signs(many), other(many))


@pytest.mark.parametrize(
    ("family", "adapter", "words"),
    [
        (FluxDev, "lora", "FluxPipeline takes no image to edit"),
        (SEES_IMAGES, "lora", "the text encoder of QwenImageEditPlusPipeline has seen the control"),
        (FluxKontext, "full", "needs an adapter whose update can be negated"),
    ],
)
def test_models_and_adapters_that_cannot_be_turned_are_refused(family, adapter, words):
    settings = compose("train", "objective=slider", f"adapter={adapter}")
    objective, adapter = (instantiate(settings[name], _convert_="all") for name in ("objective", "adapter"))
    with pytest.raises(UserError, match=words):
        objective.check_model(family, adapter)
    with pytest.raises(UserError, match="needs one condition image for each target, and a sample of 32x32 has 2"):
        objective.check_sizes([((SIZE, SIZE, SIZE), ())])
