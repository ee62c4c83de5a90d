"""A layer's update as a product of two low-rank ones, number by number (LoHa, FedPara, arXiv 2108.06098)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from lightning_modules.adapters.factors import Factors
from lightning_modules.adapters.low_rank import LowRank, swap_halves

PARTS = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


class Hadamard(Factors):
    """The update `(w1_a @ w1_b) * (w2_a @ w2_b)`.

    Args:
        ups: w1_a (out, r) and w2_a (out, s).
        downs: w1_b (r, in) and w2_b (s, in).
    """

    kind = "LoHa"

    def __init__(self, ups: Sequence[Tensor], downs: Sequence[Tensor]) -> None:
        self.ups, self.downs = tuple(ups), tuple(downs)

    @classmethod
    def is_complete(cls, parts: Collection[str]) -> bool:
        return set(PARTS) <= set(parts)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        ups, downs = ([tensors[f"hada_{name}_{half}"] for name in ("w1", "w2")] for half in "ab")
        shapes = [tuple(tensors[name].shape) for name in PARTS]
        flat = all(len(shape) == 2 and min(shape) > 0 for shape in shapes)
        if not flat or any(up.shape[1] != down.shape[0] for up, down in zip(ups, downs, strict=True)):
            raise ValueError(f"matrices of {' and '.join(map(str, shapes))}")
        if len({len(up) for up in ups}) > 1 or len({down.shape[1] for down in downs}) > 1:
            raise ValueError(f"matrices of {' and '.join(map(str, shapes))}")
        return cls(ups, downs)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(PARTS, (self.ups[0], self.downs[0], self.ups[1], self.downs[1]), strict=True))

    @property
    def sides(self) -> tuple[int, int]:
        return self.ups[0].shape[0], self.downs[0].shape[1]

    @property
    def size(self) -> str:
        return " by ".join(dict.fromkeys(str(len(down)) for down in self.downs))

    @property
    def divisor(self) -> int:
        return len(self.downs[0])

    def scaled(self, factor: float) -> Self:
        return type(self)((self.ups[0] * factor, self.ups[1]), self.downs)

    def low_rank(self) -> LowRank:
        """The same as a sum of r s components: each of the one beside each of the other."""
        up = (self.ups[0].unsqueeze(2) * self.ups[1].unsqueeze(1)).flatten(1)
        down = (self.downs[0].unsqueeze(1) * self.downs[1].unsqueeze(0)).flatten(0, 1)
        return LowRank(down, up)

    def apply(self, x: Tensor) -> Tensor:
        """By `low_rank` where that is smaller than the matrix, which would be made and kept in each step."""
        components = len(self.downs[0]) * len(self.downs[1])
        if components >= min(self.sides):
            return F.linear(x, self.delta())
        update = self.low_rank()
        return F.linear(F.linear(x, update.down), update.up)

    def delta(self) -> Tensor:
        one, other = (up @ down for up, down in zip(self.ups, self.downs, strict=True))
        return one * other

    def divided(self, widths: Sequence[int], swapped: bool) -> list["Hadamard"]:
        pieces = [swap_halves(up, swapped).split(list(widths)) for up in self.ups]
        return [Hadamard(ups, self.downs) for ups in zip(*pieces, strict=True)]
