"""What a file says of one linear layer, whatever it is made of."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor


class Unread(ValueError):
    """Tensors that fit together, in a form that Retouch does not read."""


class Update(Protocol):
    """An update of a linear layer's weight W (out, in); every factor is in it."""

    @property
    def kind(self) -> str:
        """What people call it."""
        ...

    @classmethod
    def is_complete(cls, parts: Collection[str]) -> bool:
        """Whether these tensors are enough to make one."""
        ...

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Of tensors by the names of `KINDS`; raises ValueError for such as do not fit together."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Those that it is made of, by the names of `kinds.KINDS`."""
        ...

    @property
    def sides(self) -> tuple[int | None, int]:
        """(out, in) of the layers that it fits; None where any number fits."""
        ...

    @property
    def size(self) -> str:
        """Its rank, or what it has in its place, in words."""
        ...

    @property
    def divisor(self) -> int | None:
        """What a file's alpha is divided by; None where loaders leave alpha out."""
        ...

    @property
    def unwritable(self) -> str:
        """Why no file can hold it; empty where one can."""
        ...

    def like(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same of other tensors."""
        ...

    def scaled(self, factor: float) -> Self:
        """The same, times a number."""
        ...

    def to(self, dtype: torch.dtype) -> Self:
        """As it is when its numbers are kept in another dtype."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """What it adds to the layer's output, or to its input: (..., in) -> (..., out), or (..., in)."""
        ...

    def delta(self) -> Tensor:
        """The matrix by which `apply` multiplies, (out, in) or (in, in)."""
        ...

    def updated(self, weight: Tensor) -> Tensor:
        """The weight (out, in) with it, in float32 on the weight's device."""
        ...

    def square(self) -> float:
        """The sum of the squares of the numbers of `delta`: its Frobenius norm, squared."""
        ...

    def reduced(self, rank: int) -> "Update":
        """The closest low-rank update of at most this rank; raises UserError where there is none."""
        ...

    def divided(self, widths: Sequence[int], swapped: bool) -> "Sequence[Update | None]":
        """Of a layer whose outputs are those of several, what it is for each; None where it leaves one alone.

        Args:
            widths: of the outputs.
            swapped: whether the two halves of the outputs stand the other way round in the several.

        Raises:
            ValueError: it cannot be told apart.
        """
        ...
