"""Pure parts of the flow-matching loss: element-wise errors, weights of t, weights of positions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.errors import UserError


def squared_error(difference: Tensor, t: Tensor) -> Tensor:
    """(B, C, h, w), (B,) -> (B, C, h, w)."""
    return difference.square()


@dataclass(frozen=True)
class Huber:
    """Quadratic below a threshold and linear above it, so that outliers count less; small errors count as squares.

    Args:
        delta: the threshold; for `exponential` at t = 1.
        schedule: `constant`; or `exponential`, delta ** t: 1 at t = 0, where x_t contains no noise to predict and
            errors are large (kohya-ss/sd-scripts, huber_schedule).
    """

    delta: float
    schedule: Literal["constant", "exponential"]

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "exponential"):
            raise UserError(f"objective.loss.schedule={self.schedule}: choose constant or exponential")

    def threshold(self, t: Tensor) -> Tensor:
        """(B,) -> (B, 1, 1, 1)."""
        t = torch.ones_like(t) if self.schedule == "constant" else t
        return torch.exp(t * math.log(self.delta)).view(-1, 1, 1, 1)

    def __call__(self, difference: Tensor, t: Tensor) -> Tensor:
        """(B, C, h, w), (B,) -> (B, C, h, w)."""
        delta, size = self.threshold(t), difference.abs()
        return torch.where(size <= delta, size.square(), delta * (2 * size - delta))


class PseudoHuber(Huber):
    """The smooth version: 2 d (sqrt(x^2 + d^2) - d) of an error x and the threshold d."""

    def __call__(self, difference: Tensor, t: Tensor) -> Tensor:
        delta = self.threshold(t)
        # As a quotient: the difference of the roots would cancel.
        return 2 * delta * difference.square() / ((difference.square() + delta.square()).sqrt() + delta)


def cosine(t: Tensor) -> Tensor:
    """(B,) -> (B,): 2 / (pi (1 - 2 t + 2 t^2)), largest at t = 1/2 (`cosmap` of arXiv 2403.03206)."""
    return 2 / (math.pi * (1 - 2 * t + 2 * t.square()))


WEIGHTINGS: dict[str | None, Callable[[Tensor], Tensor] | None] = {None: None, "cosine": cosine}

# Side of the square of latent positions over which changes are averaged; odd, to have a centre.
SMOOTH = 3


@dataclass(frozen=True)
class EditWeight:
    """Weights each position by how much the edit changes it, so that a small edit of a large image is not drowned.

    A function of the latents that are cached with the sample.

    Args:
        floor: weight of unchanged positions; the most changed position has weight 1. 1: no weights.
    """

    floor: float

    def __call__(self, target: Tensor, control: Tensor) -> Tensor:
        """Return the weights (B, 1, h, w); arguments as for `region`."""
        return self.floor + (1 - self.floor) * self.region(target, control)

    def region(self, target: Tensor, control: Tensor) -> Tensor:
        """Return each position's change relative to the sample's largest, (B, 1, h, w); 0 if nothing changes.

        Args:
            target: (B, C, h, w) normalized latents.
            control: latents of the edited image; if its size differs, both are compared at the smaller one.
        """
        size = target.shape[-2:]
        grid = [min(sides) for sides in zip(size, control.shape[-2:], strict=True)]
        if control.shape[-2:] != size:
            target, control = (F.interpolate(one, size=grid, mode="area") for one in (target, control))
        change = (target - control).square().mean(dim=1, keepdim=True)
        change = F.avg_pool2d(change, SMOOTH, 1, SMOOTH // 2, count_include_pad=False).sqrt()
        if change.shape[-2:] != size:
            change = F.interpolate(change, size=size, mode="bilinear", align_corners=False)
        largest = change.amax(dim=(1, 2, 3), keepdim=True)
        return change / largest.clamp_min(1e-6)
