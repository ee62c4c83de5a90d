"""A layer's low-rank update, and what can be computed of it without making the whole matrix."""

from collections.abc import Mapping, Sequence
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

    def gram(self) -> Tensor:
        """(rank, rank) inner products of the components, in float64: of some of them, their sum's norm squared."""
        down, up = self.down.double(), self.up.double()
        return (up.T @ up) * (down @ down.T)

    def square(self) -> float:
        """The sum of the squares of the update's numbers: its Frobenius norm, squared."""
        return float(self.gram().sum())

    def first(self, count: int) -> "LowRank":
        """The update of its first components alone."""
        return self._replace(down=self.down[:count].contiguous(), up=self.up[:, :count].contiguous())

    def reduced(self, rank: int) -> "LowRank":
        """The closest update of at most this rank; one of no more components stays as it is.

        By the singular values of `up @ down` (Eckart and Young, 1936), which are those of a matrix of (rank, rank).
        """
        if self.rank <= rank:
            return self
        (q_up, r_up), (q_down, r_down) = (torch.linalg.qr(half.double()) for half in (self.up, self.down.T))
        p, values, q = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
        roots = values[:rank].sqrt()  # half of each in either projection: the best for numbers of few bits
        up, down = q_up @ (p[:, :rank] * roots), (roots[:, None] * q[:rank]) @ q_down.T
        return self._replace(down=down.to(self.down.dtype), up=up.to(self.up.dtype))


def probe(in_features: int) -> Tensor:
    """The same random numbers each time, in the host's memory: updates that make the same of them are equal."""
    return torch.randn(in_features, generator=torch.Generator().manual_seed(0), device="cpu")


def inner(one: LowRank, other: LowRank) -> float:
    """The sum of the products of two updates' numbers, which are of the same layer."""
    downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, other.up)))
    return float(((ups[0].T @ ups[1]) * (downs[0] @ downs[1].T)).sum())


def minus(one: LowRank, other: LowRank) -> LowRank:
    """The difference of two updates, whose rank is the sum of theirs."""
    downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, other.up)))
    return LowRank(torch.cat(downs), torch.cat([ups[0], -ups[1]], dim=1))


def added(updates: Sequence[LowRank]) -> LowRank:
    """The sum of updates of one layer, exactly: its rank is the sum of theirs."""
    if len(updates) == 1:
        return updates[0]
    return LowRank(torch.cat([one.down for one in updates]), torch.cat([one.up for one in updates], dim=1))


def merged(loras: Sequence[Mapping[str, LowRank]], weights: Sequence[float]) -> dict[str, LowRank]:
    """The sum of LoRAs, each times its weight, by layer; they may differ in layers and ranks."""
    names = dict.fromkeys(name for lora in loras for name in lora)
    scaled = [
        {name: one.scaled(weight) for name, one in lora.items()} for lora, weight in zip(loras, weights, strict=True)
    ]
    return {name: added([lora[name] for lora in scaled if name in lora]) for name in names}


def relative_change(before: Mapping[str, LowRank], after: Mapping[str, LowRank]) -> float:
    """How much smaller or larger the difference is than the update: of all layers together, 0 where they are equal.

    A layer that is missing on one side has no update there.
    """
    whole = sum(one.square() for one in before.values())
    different = sum(max(minus(one, after[name]).square(), 0.0) for name, one in before.items() if name in after)
    different += sum(before[name].square() for name in before.keys() - after.keys())
    different += sum(after[name].square() for name in after.keys() - before.keys())
    return (different / whole) ** 0.5 if whole else 0.0
