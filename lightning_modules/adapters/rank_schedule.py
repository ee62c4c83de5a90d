"""T-LoRA's rank schedule (arXiv 2507.05964): the number of active components at a timestep.

Few components are active at high noise, all at low noise. Each sample has the mask of its own timestep.
"""

import functools
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from foundation.errors import UserError

# num_train_timesteps of the schedulers.
NUM_TRAIN_TIMESTEPS = 1000
# Parts of a timestep. A power of two: whole timesteps stay whole in float32, even after a division by 1000.
TICKS = 1024


@dataclass(frozen=True)
class RankSchedule:
    """The active rank r(t) = floor(((T - t) / T)**alpha_rank_scale * (rank - min_rank)) + min_rank, T = 1000.

    Args:
        kind: `timestep`, this formula: the full rank at t = 0; `normalised`, with (T - t) / (T - t_min) in it, t_min
            the last of the sampling timesteps or, in training, 1; `step_index`, in sampling with i / (N - 1) for step
            i = 0, 1, ... of N, whatever its timestep, in training as `timestep`; `constant`, the full rank.
        rank: R, at the end.
        min_rank: at pure noise.
        alpha_rank_scale: above 1 keeps the rank low for longer.
    """

    kind: Literal["timestep", "normalised", "step_index", "constant"]
    rank: int
    min_rank: int
    alpha_rank_scale: float

    def __post_init__(self) -> None:
        if self.kind not in ("timestep", "normalised", "step_index", "constant"):
            raise UserError(f"adapter.rank_schedule={self.kind}: choose timestep, normalised, step_index or constant")
        if type(self.rank) is not int or self.rank < 1:
            raise UserError(f"adapter.rank={self.rank}: must be a whole number from 1 on")
        if type(self.min_rank) is not int or not 0 <= self.min_rank <= self.rank:
            raise UserError(
                f"adapter.min_rank={self.min_rank}: must be a whole number from 0 to {self.rank}, adapter.rank"
            )
        if type(self.alpha_rank_scale) not in (int, float) or not 0.01 <= self.alpha_rank_scale <= 10:
            raise UserError(f"adapter.alpha_rank_scale={self.alpha_rank_scale}: must be a number from 0.01 to 10")

    def thresholds(self, ticks: int) -> list[int]:
        """Return the exact progress at which each component becomes active, of `ticks` from noise to image."""
        least = self.rank if self.kind == "constant" else self.min_rank
        span = self.rank - least
        alpha = Fraction(str(self.alpha_rank_scale)).limit_denominator(1000)
        p, q = alpha.numerator, alpha.denominator

        def works(progress: int, component: int) -> bool:
            """Return (progress / ticks)**(p / q) * span >= component, in whole numbers."""
            return progress**p * span**q >= component**q * ticks**p

        result = [0] * least
        for component in range(1, span + 1):
            near = round(ticks * (component / span) ** (1 / alpha))  # off by one at most
            result.append(next(one for one in range(max(0, near - 1), near + 2) if works(one, component)))
        return result

    def mask(self, timesteps: Tensor, sampling_timesteps: Tensor | None = None) -> Tensor:
        """(B,) timesteps in [0, 1000] -> (B, rank), True for active components; nothing waits for the GPU.

        Args:
            timesteps: timesteps in any dtype.
            sampling_timesteps: (N,) all timesteps of the sampling; None in training.
        """
        left = NUM_TRAIN_TIMESTEPS - timesteps.float()
        ticks = NUM_TRAIN_TIMESTEPS * TICKS
        if self.kind == "step_index" and sampling_timesteps is not None:
            ticks = len(sampling_timesteps) - 1
            progress = (sampling_timesteps > timesteps[:, None]).sum(dim=1)
        elif self.kind == "normalised" and sampling_timesteps is not None:
            span = NUM_TRAIN_TIMESTEPS - sampling_timesteps[-1].float()
            progress = (left / span).nan_to_num(1.0).mul(ticks).round().int()
        else:
            progress = (left * TICKS).round().int()
            if self.kind == "normalised":
                ticks -= TICKS
        return progress[:, None] >= _thresholds(self, ticks, timesteps.device)

    def active_ranks(self, timesteps: Tensor, sampling_timesteps: Tensor | None = None) -> Tensor:
        """Count the active components (B,); arguments as for `mask`."""
        return self.mask(timesteps, sampling_timesteps).sum(dim=1)


@functools.cache
def _thresholds(schedule: RankSchedule, ticks: int, device: torch.device) -> Tensor:
    return torch.tensor(schedule.thresholds(ticks), device=device)
