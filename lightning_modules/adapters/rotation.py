"""A rotation of a layer's inputs (OFT, arXiv 2306.07280, as peft and OFTv2, arXiv 2506.19847, have it)."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from datamodules.errors import UserError
from lightning_modules.adapters.factors import Factors
from lightning_modules.adapters.low_rank import LowRank


class Rotation(Factors):
    """x -> x R, R of blocks beside each other on the diagonal, so that W becomes W R^T.

    Args:
        skew: (blocks, b (b - 1) / 2), the numbers above the diagonal of each block's Q = -Q^T.
    """

    kind = "OFT"

    def __init__(self, skew: Tensor) -> None:
        self.skew = skew

    @classmethod
    def is_complete(cls, parts: Collection[str]) -> bool:
        return "oft_R" in parts

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        skew = tensors["oft_R"]
        if skew.ndim != 2 or len(skew) == 0 or elements(_side(skew)) != skew.shape[1]:
            raise ValueError(f"a matrix of {tuple(skew.shape)}")
        return cls(skew)

    def tensors(self) -> dict[str, Tensor]:
        return {"oft_R": self.skew}

    @property
    def sides(self) -> tuple[None, int]:
        return None, len(self.skew) * _side(self.skew)

    @property
    def size(self) -> str:
        return f"{len(self.skew)} blocks of {_side(self.skew)}"

    @property
    def divisor(self) -> None:
        return None

    def scaled(self, factor: float) -> Self:
        """Q times a number: at -1 it turns back, at 0 it does nothing."""
        return type(self)(self.skew * factor)

    def turns(self) -> Tensor:
        """R - 1 of each block, (blocks, b, b).

        R is Cayley's (1 + Q) / (1 - Q), by the first terms of its series as in peft: 1 + 2 Q + 2 Q^2 + 2 Q^3 + Q^4.
        """
        q = skew_symmetric(self.skew)
        q2 = q @ q
        return 2 * q + 2 * q2 + 2 * (q2 @ q) + q2 @ q2

    def apply(self, x: Tensor) -> Tensor:
        """What it adds to the layer's input, x R - x."""
        turns = self.turns()
        blocks = x.unflatten(-1, turns.shape[:2])
        return torch.einsum("...rk,rkc->...rc", blocks, turns.to(x.dtype)).flatten(-2)

    def beside(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return layer(x + self.apply(self.cast(x)).to(x.dtype))

    def delta(self) -> Tensor:
        """(R - 1)^T (in, in)."""
        return torch.block_diag(*self.turns().transpose(1, 2))

    def updated(self, weight: Tensor) -> Tensor:
        weight, turns = weight.float(), self.on(weight.device).turns()
        blocks = weight.unflatten(1, turns.shape[:2])
        return weight + torch.einsum("orc,rkc->ork", blocks, turns).flatten(1)

    def square(self) -> float:
        return float(self.turns().double().square().sum())

    def reduced(self, rank: int) -> LowRank:
        raise UserError(
            f"rank={rank}: an OFT turns a layer's inputs, which no LoRA is near to: fuse=true writes a transformer "
            "that has it in its weights"
        )

    def divided(self, widths: Sequence[int], swapped: bool) -> "list[Rotation]":
        """Layers that share an input share its rotation."""
        return [self] * len(widths)


def elements(side: int) -> int:
    """How many numbers are above a matrix's diagonal."""
    return side * (side - 1) // 2


def skew_symmetric(above: Tensor) -> Tensor:
    """Numbers above the diagonal (B, b (b - 1) / 2), row by row -> (B, b, b), with their negatives below it."""
    side = _side(above)
    rows, columns = torch.triu_indices(side, side, 1, device=above.device)
    flat = above.new_zeros(len(above), side * side).index_copy(1, rows * side + columns, above)
    upper = flat.view(-1, side, side)
    return upper - upper.transpose(1, 2)


def _side(skew: Tensor) -> int:
    return (1 + math.isqrt(1 + 8 * skew.shape[-1])) // 2
