"""A layer's low-rank update, and what can be computed of it without making the whole matrix."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """The update `up @ down` of a linear layer's weight, in float32; every factor is in it.

    Attributes:
        down: (rank, in).
        up: (out, rank).
        magnitude: DoRA's (arXiv 2402.09353), (out,): the norms of the updated weight's rows; None for a LoRA.
    """

    down: Tensor
    up: Tensor
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """How many components it has."""
        return self.down.shape[0]

    def scaled(self, factor: float) -> "LowRank":
        """The same, times a number."""
        return self._replace(up=self.up * factor)

    def to(self, dtype: torch.dtype) -> "LowRank":
        """As it is when its numbers are kept in another dtype."""
        magnitude = None if self.magnitude is None else self.magnitude.to(dtype)
        return LowRank(self.down.to(dtype), self.up.to(dtype), magnitude)

    def apply(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return x @ self.down.T @ self.up.T

    def square(self) -> float:
        """The sum of the squares of the update's numbers: its Frobenius norm, squared."""
        return inner(self, self)


def inner(one: LowRank, other: LowRank) -> float:
    """The sum of the products of two updates' numbers, which are of the same layer."""
    downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, other.up)))
    return float(((ups[0].T @ ups[1]) * (downs[0] @ downs[1].T)).sum())


def minus(one: LowRank, other: LowRank) -> LowRank:
    """The difference of two updates, whose rank is the sum of theirs."""
    downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, other.up)))
    return LowRank(torch.cat(downs), torch.cat([ups[0], -ups[1]], dim=1))


def relative_change(before: Mapping[str, LowRank], after: Mapping[str, LowRank]) -> float:
    """How much smaller or larger the difference is than the update: of all layers together, 0 where they are equal."""
    whole = sum(one.square() for one in before.values())
    different = sum(max(minus(one, after[name]).square(), 0.0) for name, one in before.items())
    return (different / whole) ** 0.5 if whole else 0.0
