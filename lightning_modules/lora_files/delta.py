"""Deltas: the update of one linear layer's weight, in any form that a LoRA file can have, and arithmetic of LoRAs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor


class Delta(ABC):
    """An update of a linear layer's weight W (out, in), with every scale factor applied.

    Attributes:
        parts: names of the tensors that it may consist of.
        unwritable: why no file can hold it; empty if one can.
    """

    parts: ClassVar[tuple[str, ...]]
    unwritable: str = ""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Build a delta from tensors named as in `parts`; raises KeyError, or ValueError for shapes that do not fit."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name of its form, as people call it."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in) of the layers that it fits."""

    @property
    @abstractmethod
    def size(self) -> str:
        """Its rank, or its counterpart in other forms, in words."""

    @property
    @abstractmethod
    def divisor(self) -> int | None:
        """The divisor of a file's alpha; None if loaders ignore alpha."""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """Multiply the delta by a factor."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Compute the change of the layer's output: (..., in) -> (..., out)."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Return the matrix of `apply`, (out, in)."""

    @abstractmethod
    def split(self, widths: Sequence[int], swapped: bool) -> "Sequence[Delta | None]":
        """Split the delta of a fused layer (qkv) into one per sub-layer; None for an unchanged one.

        Args:
            widths: output sizes of the sub-layers.
            swapped: whether the two halves of the outputs are in reverse order in the fused layer.
        """

    def like(self, tensors: Mapping[str, Tensor]) -> Self:
        """Build a delta of the same form from other tensors."""
        return self.from_tensors(tensors)

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None, copy: bool = False) -> Self:
        return self.like({name: tensor.to(device, dtype, copy=copy) for name, tensor in self.tensors().items()})

    def forward(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute the layer's output with the delta: (..., in) -> (..., out)."""
        y = layer(x)
        return y + self.apply(self.cast(x)).to(y.dtype)

    def cast(self, x: Tensor) -> Tensor:
        """Convert an input to the dtype of the tensors, unless autocast converts both."""
        device = x.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        return x if autocast else x.to(next(iter(self.tensors().values())).dtype)

    def updated(self, weight: Tensor) -> Tensor:
        """Return the weight (out, in) with the delta applied, in float32 on the weight's device."""
        return weight.float() + self.to(torch.float32, weight.device).matrix()

    def square(self) -> float:
        """Return the squared Frobenius norm of `matrix`."""
        return float(self.matrix().double().square().sum())

    def reduced(self, rank: int) -> "LowRank":
        """Return the closest low-rank delta of at most this rank."""
        matrix = self.matrix()
        return best_of_rank(matrix, min(rank, *matrix.shape))[0]


@dataclass(frozen=True, eq=False)
class LowRank(Delta):
    """The delta `up @ down`, in float32.

    Attributes:
        down: (rank, in).
        up: (out, rank).
        magnitude: DoRA's (arXiv 2402.09353), (out,): row norms of the updated weight; None for a LoRA.
    """

    parts = ("down", "up", "magnitude")

    down: Tensor
    up: Tensor
    magnitude: Tensor | None = None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        down, up, magnitude = tensors["down"], tensors["up"], tensors.get("magnitude")
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1] or len(down) == 0:
            raise ValueError(f"matrices of {tuple(down.shape)} and {tuple(up.shape)}")
        rows = len(up)
        if magnitude is not None and magnitude.shape == (1, down.shape[1]) != (rows, 1):
            raise ValueError(
                "a DoRA magnitude per input, OneTrainer's default; Retouch reads only a magnitude per output"
            )
        if magnitude is not None and magnitude.shape not in ((rows,), (rows, 1)):  # ComfyUI has a column
            raise ValueError(f"a magnitude of {tuple(magnitude.shape)} for {rows} outputs")
        return cls(down, up, None if magnitude is None else magnitude.flatten())

    def tensors(self) -> dict[str, Tensor]:
        magnitude = {} if self.magnitude is None else {"magnitude": self.magnitude}
        return {"down": self.down, "up": self.up, **magnitude}

    @property
    def kind(self) -> str:
        return "LoRA" if self.magnitude is None else "DoRA"

    @property
    def shape(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def size(self) -> str:
        return str(self.rank)

    @property
    def divisor(self) -> int:
        return self.rank

    def scaled(self, factor: float) -> Self:
        return replace(self, up=self.up * factor)

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None, copy: bool = False) -> Self:
        """Convert the projections; a magnitude keeps its dtype, as in files."""
        down, up = (half.to(device, dtype, copy=copy) for half in (self.down, self.up))
        magnitude = self.magnitude
        return type(self)(down, up, None if magnitude is None else magnitude.to(device, copy=copy))

    def apply(self, x: Tensor) -> Tensor:
        return x @ self.down.T @ self.up.T

    def matrix(self) -> Tensor:
        return self.up @ self.down

    def updated(self, weight: Tensor) -> Tensor:
        """Return W + up down in float32, with its rows scaled to DoRA's magnitudes (arXiv 2402.09353)."""
        wanted = weight.float() + self.up.to(weight.device) @ self.down.to(weight.device)
        if self.magnitude is not None:
            norms = wanted.norm(dim=1)
            wanted *= (self.magnitude.to(weight.device) / norms.where(norms > 0, 1.0))[:, None]
        return wanted

    def square(self) -> float:
        down, up = self.down.double(), self.up.double()
        return float(((up.T @ up) * (down @ down.T)).sum())  # the inner products of the components

    def first(self, count: int) -> Self:
        return replace(self, down=self.down[:count].contiguous(), up=self.up[:, :count].contiguous())

    def reduced(self, rank: int) -> "LowRank":
        """Return the closest delta of at most this rank, or itself if its rank is no higher.

        Keeps the largest singular values of `up @ down` (Eckart and Young, 1936), computed from a (rank, rank) matrix.
        """
        if self.rank <= rank:
            return self
        (q_up, r_up), (q_down, r_down) = (torch.linalg.qr(half.double()) for half in (self.up, self.down.T))
        p, values, q = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
        roots = values[:rank].sqrt()  # half of each in either projection: best for dtypes of few bits
        up, down = q_up @ (p[:, :rank] * roots), (roots[:, None] * q[:rank]) @ q_down.T
        return replace(self, down=down.to(self.down.dtype), up=up.to(self.up.dtype))

    def split(self, widths: Sequence[int], swapped: bool) -> "list[LowRank | None]":
        """Give each sub-layer the components that reach it; without a component, it has no delta."""
        ups = swap_halves(self.up, swapped).split(list(widths))
        magnitudes: Sequence[Tensor | None] = [None] * len(ups)
        if self.magnitude is not None:
            magnitudes = swap_halves(self.magnitude, swapped).split(list(widths))
        found: list[LowRank | None] = []
        for up, magnitude in zip(ups, magnitudes, strict=True):
            used = (up != 0).any(dim=0)
            if len(ups) == 1 or not self.up.any():
                found.append(LowRank(self.down, up.contiguous(), magnitude))
            elif not used.any() and magnitude is None:
                found.append(None)
            else:
                used[0] |= not used.any()  # its rows are scaled all the same
                found.append(LowRank(self.down[used].contiguous(), up[:, used].contiguous(), magnitude))
        return found


def swap_halves(rows: Tensor, swapped: bool = True) -> Tensor:
    """Put the second half of the rows before the first."""
    return torch.cat(rows.chunk(2)[::-1]) if swapped else rows


def best_of_rank(matrix: Tensor, rank: int) -> tuple[LowRank, float]:
    """Return the delta of a rank that is nearest to a matrix (out, in), and the squared distance (Frobenius norm).

    Uses the eigenvectors of the smaller Gram matrix in double precision: as exact as an SVD in single precision, and
    several times as fast. Both factors share the singular values, as in trained LoRAs.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if tall else matrix).double()
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    kept = vectors[:, -rank:].flip(1)  # (smaller size, rank), the largest first
    rest = kept.T @ wide
    lost = float((wide.square().sum() - rest.square().sum()).clamp_min(0))
    share = rest.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    left, right = kept * share, rest / share[:, None]
    down, up = (left.T, right.T) if tall else (right, left)
    return LowRank(down.float().cpu().contiguous(), up.float().cpu().contiguous()), lost


def squared_difference(one: Delta, other: Delta) -> float:
    """Return the squared Frobenius norm of the difference of two deltas of one layer."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, -other.up)))
        return max(LowRank(torch.cat(downs), torch.cat(ups, dim=1)).square(), 0.0)
    return float((one.matrix().double() - other.matrix().double()).square().sum())


def relative_change(before: Mapping[str, Delta], after: Mapping[str, Delta]) -> float:
    """Return the norm of the difference of two LoRAs relative to the first, over all layers.

    A layer that only one of them has counts as zero in the other.
    """
    whole = sum(one.square() for one in before.values())
    different = sum(squared_difference(one, after[name]) for name, one in before.items() if name in after)
    different += sum(before[name].square() for name in before.keys() - after.keys())
    different += sum(after[name].square() for name in after.keys() - before.keys())
    return (different / whole) ** 0.5 if whole else 0.0


def weighted_sum(loras: Sequence[Mapping[str, LowRank]], weights: Sequence[float]) -> dict[str, LowRank]:
    """Return the exact weighted sum of LoRAs, by layer; layers and ranks may differ, and ranks add up."""
    names = dict.fromkeys(name for lora in loras for name in lora)
    found = {}
    for name in names:
        terms = [lora[name].scaled(weight) for lora, weight in zip(loras, weights, strict=True) if name in lora]
        down, up = torch.cat([one.down for one in terms]), torch.cat([one.up for one in terms], dim=1)
        found[name] = terms[0] if len(terms) == 1 else LowRank(down, up)
    return found
