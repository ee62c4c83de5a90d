"""The flow's formulas against closed forms and against diffusers."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux_kontext import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling

from foundation.errors import UserError
from lightning_modules.flow import (
    TimestepLaw,
    dynamic_shift,
    flow_loss,
    sample_noise,
    shift_time,
)

SHAPE = torch.Size([2, 4, 4])


def timestep_law(law="uniform", **settings) -> TimestepLaw:
    return TimestepLaw(law, **{"logit_mean": 0.0, "logit_std": 1.0, "shift": None, **settings})


def drawn_times(law: TimestepLaw, count: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([law.draw(generator, pipeline_shift=2.0) for _ in range(count)])


@pytest.mark.parametrize("tokens", [16, 256, 1024, 4096, 8192])
def test_dynamic_shift_equals_the_pipelines(tokens):
    mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
    assert dynamic_shift(tokens, {}) == pytest.approx(math.exp(mu))
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    t = torch.linspace(0.01, 1, 20)
    expected = torch.as_tensor(scheduler.time_shift(mu, 1.0, t))
    torch.testing.assert_close(shift_time(t, dynamic_shift(tokens, {})), expected)


@pytest.mark.parametrize("scheme", ["logit_normal", "mode"])
def test_timestep_law_has_diffusers_density(scheme):
    law = timestep_law(scheme, logit_mean=0.0, logit_std=1.2)
    theirs = compute_density_for_timestep_sampling(
        scheme, 4000, 0.0, 1.2, 1.29, generator=torch.Generator().manual_seed(1)
    )
    quantiles = torch.linspace(0.05, 0.95, 10)
    own = drawn_times(law)
    assert own.dtype == torch.float32
    assert (own.quantile(quantiles) - theirs.quantile(quantiles)).abs().max() < 0.03


def test_unknown_law_is_refused_in_a_line():
    with pytest.raises(UserError, match=r"model\.timesteps\.law=cosmap: choose uniform"):
        timestep_law("cosmap")


def test_draw_depends_only_on_seed_and_index():
    law = timestep_law("logit_normal")
    together = sample_noise(1, [7, 8], SHAPE, law, 1.0)
    alone = sample_noise(1, [8], SHAPE, law, 1.0)
    for name in ("t", "eps", "latent_eps"):
        assert torch.equal(getattr(together, name)[1:], getattr(alone, name))
    assert not torch.equal(together.eps[0], together.eps[1])
    assert not torch.equal(alone.eps, sample_noise(2, [8], SHAPE, law, 1.0).eps)


def test_draws_of_neighbours_are_unrelated_and_normal():
    drawn = sample_noise(0, list(range(500)), torch.Size([1, 8, 8]), timestep_law("uniform"), 1.0)
    eps = drawn.eps.flatten(1)
    assert abs(eps.mean()) < 0.02
    assert abs(eps.std() - 1) < 0.02
    assert (eps[:-1] * eps[1:]).mean().abs() < 0.02


def test_masked_loss_weights_pixels_and_normalizes_each_sample():
    velocity, target = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    full = flow_loss(velocity, target)
    torch.testing.assert_close(full, (velocity - target).square().mean(dim=(1, 2, 3)))
    torch.testing.assert_close(flow_loss(velocity, target, torch.ones(2, 1, 32, 32)), full)
    mask = torch.zeros(2, 1, 32, 32)
    mask[:, :, :16, :8] = 1  # the latent's upper half, first quarter
    expected = (velocity - target).square()[:, :, :2, :1].mean(dim=(1, 2, 3))
    torch.testing.assert_close(flow_loss(velocity, target, mask), expected)
