"""The number of active components at each timestep, and forward passes without one."""

import math
from decimal import Decimal, getcontext
from fractions import Fraction

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from foundation.errors import UserError
from lightning_modules.adapters.rank_schedule import RankSchedule

EVERY_TIMESTEP = range(1001)
# Float32 arithmetic is wrong for the second to fourth: at t = 160, 410 and 100.
SETTINGS = [(16, 8, 1), (76, 1, 1), (101, 1, 1), (101, 1, 2), (32, 1, 1), (64, 1, 2), (128, 0, 3), (40, 4, 0.5)]
SETTINGS += [(64, 1, 1.5), (33, 7, 0.7), (64, 1, 0.01), (64, 1, 9.99), (32, 2, 0.3333), (8, 8, 1), (1, 1, 1)]


def exact_rank(t: int, rank: int, min_rank: int, alpha: float, t_min: int = 0) -> int:
    """Compute the paper's formula in integers or, for a fractional exponent, to 80 digits."""
    left, span = 1000 - t, rank - min_rank
    if alpha == int(alpha):
        return left ** int(alpha) * span // (1000 - t_min) ** int(alpha) + min_rank
    getcontext().prec = 80
    power = (Decimal(left) / (1000 - t_min)) ** Decimal(str(alpha)) if left else Decimal(0)
    return math.floor(power * span + Decimal("1e-60")) + min_rank


@pytest.mark.parametrize(("rank", "min_rank", "alpha"), SETTINGS)
def test_active_rank_equals_exact_arithmetic_at_every_timestep(rank, min_rank, alpha):
    schedule = RankSchedule("timestep", rank, min_rank, alpha)
    exact = [exact_rank(t, rank, min_rank, alpha) for t in EVERY_TIMESTEP]
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32):
        timesteps = torch.tensor(EVERY_TIMESTEP).to(dtype)  # coarse dtypes round, to other whole timesteps
        assert schedule.active_ranks(timesteps).tolist() == [exact[int(t)] for t in timesteps], dtype
    in_thousandths = torch.tensor(EVERY_TIMESTEP, dtype=torch.float32) / 1000  # as transformers are called
    assert schedule.active_ranks(in_thousandths * 1000).tolist() == exact


@pytest.mark.parametrize(("rank", "min_rank", "alpha"), [(32, 1, 1), (64, 1, 2), (101, 1, 1)])
def test_sampling_timesteps_between_whole_ones_are_not_rounded_to_them(rank, min_rank, alpha):
    timesteps = torch.arange(8001) / 8
    progress = [1 - Fraction(k, 8000) for k in range(8001)]
    expected = [math.floor(p**alpha * (rank - min_rank)) + min_rank for p in progress]
    assert RankSchedule("timestep", rank, min_rank, alpha).active_ranks(timesteps).tolist() == expected


def flux_timesteps(steps: int) -> torch.Tensor:
    """Return FLUX's timesteps at 1024x1024."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps, dtype=torch.float64).tolist(), mu=1.15)
    return scheduler.timesteps


@pytest.mark.parametrize(("rank", "min_rank", "steps"), [(16, 8, 1), (32, 1, 28), (64, 1, 7)])
def test_step_index_counts_steps_and_not_timesteps(rank, min_rank, steps):
    schedule = RankSchedule("step_index", rank, min_rank, 2.0)
    for timesteps in (flux_timesteps(steps), torch.linspace(900, 3, steps)):
        got = [int(schedule.active_ranks(t.reshape(1), timesteps)) for t in timesteps]
        progress = [Fraction(i, steps - 1) if steps > 1 else Fraction(1) for i in range(steps)]
        assert got == [math.floor(p**2 * (rank - min_rank)) + min_rank for p in progress]
    same = RankSchedule("timestep", rank, min_rank, 2.0)
    t = torch.arange(1001)
    assert torch.equal(schedule.mask(t), same.mask(t)), "in training there are no steps"


@pytest.mark.parametrize(("rank", "min_rank", "alpha"), SETTINGS[:8])
def test_normalised_reaches_the_full_rank_in_the_last_step_and_in_training(rank, min_rank, alpha):
    schedule = RankSchedule("normalised", rank, min_rank, alpha)
    timesteps = flux_timesteps(28)
    ranks = schedule.active_ranks(timesteps, timesteps).tolist()
    assert ranks[-1] == rank
    assert ranks == sorted(ranks)
    expected = [exact_rank(t, rank, min_rank, alpha, t_min=1) for t in range(1, 1001)]
    assert schedule.active_ranks(torch.arange(1, 1001)).tolist() == expected
    assert schedule.active_ranks(torch.tensor([0.0, 0.4])).tolist() == [rank, rank]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("sigmoid", 16, 1, 1.0), "adapter.rank_schedule=sigmoid: choose timestep"),
        (("timestep", 16, 17, 1.0), "adapter.min_rank=17: must be a whole number from 0 to 16"),
        (("timestep", 16, 1, 0), "adapter.alpha_rank_scale=0: must be a number from 0.01 to 10"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(UserError, match=words):
        RankSchedule(*settings)
