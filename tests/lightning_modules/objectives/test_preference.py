"""Preferences: against a closed form, and against an independent computation on a tiny FLUX Kontext."""

import math

import pytest
import torch
import torch.nn.functional as F

from datamodules.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.flow import FlowMatching, TimestepLaw
from lightning_modules.objectives.preference import PreferenceObjective
from tests.support.combinations import first
from tests.support.objectives import gradients, latent_batch, losses, noised
from tests.support.steps import assert_same
from tests.support.tiny_adapters import build, learn

DRAWS = list(range(3))
UNIFORM = TimestepLaw("uniform", 0.0, 1.0, None)


class Line:
    """A model of two parameters, v = a x_t + b, whose base has others."""

    def __init__(self, a, b):
        self.a, self.b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (a, b))

    def __call__(self, x_t, t, controls, prompt):
        return (self.a * x_t.double() + self.b).float()

    def base(self, x_t, t, controls, prompt):
        return (0.4 * x_t.double() - 0.1).float()


@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradients_of_a_line_are_the_closed_form(masked):
    """Derived by hand: e = mean w (a x + b - u)^2, de/da = mean 2 w x (a x + b - u), and the sigmoid's derivative."""
    beta, latents = 30.0, latent_batch(DRAWS, rejected=True, masked=masked)
    latents.weights = torch.tensor([1.0, 0.5, 2.0])
    given = FlowMatching(UNIFORM, "sample", 5).noised(latents, 1.0, lambda tensor: tensor)
    line = Line(0.3, 0.2)
    found = PreferenceObjective(beta).losses(latents, given, line, 0)
    found.sum().backward()
    loss, da, db = [], 0.0, 0.0
    for row in range(3):
        area = torch.ones(1, 4, 6) if not masked else latents.mask[row].reshape(1, 4, 8, 6, 8).mean((2, 4))
        w = (area / area.sum()).double().expand(8, 4, 6) / 8
        moments = []
        for x0 in (given.x0[row].double(), given.rejected[row].double()):
            t, eps = given.t[row].double(), given.eps[row].double()
            x, u = (1 - t) * x0 + t * eps, eps - x0
            left, base = 0.3 * x + 0.2 - u, 0.4 * x - 0.1 - u
            error = float((w * (left**2 - base**2)).sum())
            moments.append((error, float((w * 2 * left * x).sum()), float((w * 2 * left).sum())))
        (e_w, a_w, b_w), (e_l, a_l, b_l) = moments
        z = -beta / 2 * (e_w - e_l)
        weight = float(latents.weights[row])
        loss.append(weight * math.log(1 + math.exp(-z)))
        slope = weight * beta / 2 / (1 + math.exp(z))
        da, db = da + slope * (a_w - a_l), db + slope * (b_w - b_l)
    torch.testing.assert_close(found, torch.tensor(loss), rtol=1e-5, atol=1e-5)
    assert float(line.a.grad) == pytest.approx(da, rel=1e-4)
    assert float(line.b.grad) == pytest.approx(db, rel=1e-4)


def made(tiny, adapter="lora", *more):
    module = build(tiny, adapter, "objective=dpo", "objective.beta=20", *more)
    learn(module)
    return module


def test_tiny_flux_by_two_models(tiny):
    """The base is a separate untrained module; both images share t and noise."""
    module, base = made(tiny), build(tiny, "lora")
    latents = latent_batch(DRAWS, rejected=True)
    result = gradients(module, latents)
    module.transformer.zero_grad()
    given = noised(module, latents)
    t = given.t.view(-1, 1, 1, 1)
    logits = []
    for x0 in (given.x0, given.rejected):
        asked = (1 - t) * x0 + t * given.eps, given.t, given.controls, given.prompt
        errors = [(each.denoise(*asked) - (given.eps - x0)).square().mean(dim=(1, 2, 3)) for each in (module, base)]
        logits.append(errors[0] - errors[1].detach())
    expected = F.softplus(20 / 2 * (logits[0] - logits[1]))
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


def test_an_adapter_that_has_learned_nothing_has_log_two_and_a_gradient(tiny):
    module = build(tiny, "lora", "objective=dpo")
    found = gradients(module, latent_batch(DRAWS, rejected=True))
    torch.testing.assert_close(found.pop("losses"), torch.full((3,), math.log(2)), rtol=0, atol=0)
    assert max(gradient.abs().max() for gradient in found.values()) > 1e-3


@pytest.mark.parametrize("adapter", first(1, ["tlora", "lora"]))
def test_batch_is_its_samples_alone_and_computing_again_changes_nothing(tiny, adapter):
    module = made(tiny, adapter, "model.gradient_checkpointing=none")
    latents = latent_batch(DRAWS, rejected=True, masked=True)
    alone = torch.cat([losses(module, latent_batch([draw], rejected=True, masked=True)) for draw in DRAWS])
    torch.testing.assert_close(losses(module, latents), alone, rtol=1e-4, atol=1e-5)
    plain = gradients(module, latents)
    for policy in ("selective", "full"):
        module.execution.set_checkpointing(module.transformer, policy)
        assert_same(gradients(module, latents), plain)


def test_a_batch_without_rejected_pictures_is_refused(tiny):
    with pytest.raises(UserError, match="rejected image, which 0 lack"):
        losses(made(tiny), latent_batch(DRAWS))
