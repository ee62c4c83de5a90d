"""Preferences: against an independent computation on a tiny FLUX Kontext."""

import pytest
import torch
import torch.nn.functional as F

from foundation.errors import UserError
from lightning_modules.adapters.adapter import trainable
from tests.support.objectives import gradients, latent_batch, noised
from tests.support.tiny_adapters import build, learn

DRAWS = list(range(3))


def made(tiny, adapter="lora", *more):
    module = build(tiny, adapter, "objective=dpo", "objective.beta=20", *more)
    learn(module)
    return module


@pytest.mark.parametrize(("adapter", "masked"), [("lora", False), ("tlora", True)])
def test_loss_and_gradients_equal_those_of_two_models(tiny, adapter, masked):
    """The base is a separate untrained module; both images share t and noise."""
    module, base = made(tiny, adapter), build(tiny, "lora")
    latents = latent_batch(DRAWS, rejected=True, masked=masked)
    latents.weights = torch.tensor([1.0, 0.5, 2.0])
    area = F.avg_pool2d(latents.mask, 8) if masked else torch.ones(3, 1, 4, 6)
    weight = area / area.sum(dim=(2, 3), keepdim=True) / 8  # of each of the 8 channels
    result = gradients(module, latents)
    module.transformer.zero_grad()
    given = noised(module, latents)
    t = given.t.view(-1, 1, 1, 1)
    logits = []
    for x0 in (given.x0, given.rejected):
        asked = (1 - t) * x0 + t * given.eps, given.t, given.controls, given.prompt
        errors = [
            (weight * (each.denoise(*asked) - (given.eps - x0)).square()).sum(dim=(1, 2, 3)) for each in (module, base)
        ]
        logits.append(errors[0] - errors[1].detach())
    expected = latents.weights * F.softplus(20 / 2 * (logits[0] - logits[1]))
    torch.testing.assert_close(result["losses"], expected.detach(), rtol=1e-4, atol=1e-5)
    expected.sum().backward()
    for name, parameter in trainable(module.transformer).items():
        torch.testing.assert_close(result[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_target_and_rejected_are_drawn_from_their_distributions_by_one_noise(tiny):
    module, latents = made(tiny), latent_batch(DRAWS, rejected=True)
    given = noised(module, latents)
    shift = module.normalize(torch.zeros(1))
    scale = module.normalize(torch.ones(1)) - shift
    by_target, by_rejected = (
        (x0 - module.normalize(mean)) / (scale * std)
        for x0, mean, std in (
            (given.x0, latents.target_mean, latents.target_std),
            (given.rejected, latents.rejected_mean, latents.rejected_std),
        )
    )
    torch.testing.assert_close(by_target, by_rejected, rtol=1e-3, atol=1e-3)
    assert by_target.std() == pytest.approx(1, abs=0.1)


def test_samples_without_rejected_images_are_refused(tiny):
    with pytest.raises(UserError, match="rejected image, which some samples lack"):
        made(tiny).objective.check_sizes([(((32, 32), (32, 32)), ())])
