"""A layer's update as a Kronecker product (LoKr, arXiv 2309.14859, section 3.2)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.adapters.factors import Factors
from lightning_modules.adapters.low_rank import swap_halves

LEFT, RIGHT = "lokr_w1", "lokr_w2"
PARTS = tuple(f"{name}{end}" for name in (LEFT, RIGHT) for end in ("", "_a", "_b"))


class Kronecker(Factors):
    """The update `kron(w1, w2)`, of which rows may be left out.

    Args:
        left: w1 (l, m), or the two whose product it is, (l, r) and (r, m).
        right: w2 (k, n) in the same way: the product is (l k, m n).
        rows: how many of the first rows are left out, and how many follow that are not; None for all.
    """

    kind = "LoKr"

    def __init__(self, left: Sequence[Tensor], right: Sequence[Tensor], rows: tuple[int, int] | None = None) -> None:
        self.left, self.right, self.rows = tuple(left), tuple(right), rows

    @classmethod
    def is_complete(cls, parts: Collection[str]) -> bool:
        return all(name in parts or {f"{name}_a", f"{name}_b"} <= set(parts) for name in (LEFT, RIGHT))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        factors = [
            [tensors[name]] if name in tensors else [tensors[f"{name}_a"], tensors[f"{name}_b"]]
            for name in (LEFT, RIGHT)
        ]
        if any(name in tensors and f"{name}_a" in tensors for name in (LEFT, RIGHT)):
            raise ValueError("a factor twice, whole and as a product")
        shapes = [tuple(one.shape) for factor in factors for one in factor]
        inner = [factor[0].shape[-1] == factor[1].shape[0] for factor in factors if len(factor) == 2]
        if not all(len(shape) == 2 and min(shape) > 0 for shape in shapes) or not all(inner):
            raise ValueError(f"matrices of {' and '.join(map(str, shapes))}")
        return cls(factors[0], factors[1])

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, factor in ((LEFT, self.left), (RIGHT, self.right)):
            names = [name] if len(factor) == 1 else [f"{name}_a", f"{name}_b"]
            found |= dict(zip(names, factor, strict=True))
        return found

    def like(self, tensors: Mapping[str, Tensor]) -> Self:
        made = self.of(tensors)
        made.rows = self.rows
        return made

    @property
    def sides(self) -> tuple[int, int]:
        rows = self.left[0].shape[0] * self.right[0].shape[0] if self.rows is None else self.rows[1]
        return rows, self.left[-1].shape[1] * self.right[-1].shape[1]

    @property
    def size(self) -> str:
        words = []
        for factor in (self.left, self.right):
            rank = f" of rank {factor[1].shape[0]}" if len(factor) == 2 else ""
            words.append(f"{factor[0].shape[0]}x{factor[-1].shape[1]}{rank}")
        return " by ".join(words)

    @property
    def divisor(self) -> int | None:
        # Two whole factors are not scaled, whatever alpha says (lycoris/modules/lokr.py).
        return next((factor[1].shape[0] for factor in (self.right, self.left) if len(factor) == 2), None)

    @property
    def unwritable(self) -> str:
        return "" if self.rows is None else "rows of a Kronecker product are none themselves"

    def scaled(self, factor: float) -> Self:
        return type(self)((self.left[0] * factor, *self.left[1:]), self.right, self.rows)

    def apply(self, x: Tensor) -> Tensor:
        """By two small products: kron(w1, w2) x is w1 X w2^T of x as a matrix X (m, n)."""
        y = x.unflatten(-1, (self.left[-1].shape[1], self.right[-1].shape[1]))
        for factor in (self.right, self.left):
            for matrix in reversed(factor):
                y = F.linear(y, matrix)
            y = y.transpose(-1, -2)  # (..., m, k) -> (..., k, m), then (..., k, l) -> (..., l, k)
        y = y.flatten(-2)
        return y if self.rows is None else y.narrow(-1, *self.rows)

    def delta(self) -> Tensor:
        product = torch.kron(_product(self.left).contiguous(), _product(self.right).contiguous())
        return product if self.rows is None else product.narrow(0, *self.rows)

    def square(self) -> float:
        if self.rows is not None:
            return super().square()
        left, right = (float(_product(factor).double().square().sum()) for factor in (self.left, self.right))
        return left * right

    def divided(self, widths: Sequence[int], swapped: bool) -> list["Kronecker"]:
        """Rows of w1, and of what is left of the product those that are wanted."""
        height = self.right[0].shape[0]
        first, *rest = self.left
        if swapped:
            if len(first) % 2 or self.rows is not None:
                raise ValueError("a Kronecker product whose halves cannot change places")
            return [Kronecker((swap_halves(first), *rest), self.right)]
        found, start = [], 0 if self.rows is None else self.rows[0]
        for width in widths:
            above, end = start // height, -(-(start + width) // height)
            rows = (start - above * height, width)
            whole = rows == (0, (end - above) * height)
            found.append(Kronecker((first[above:end], *rest), self.right, None if whole else rows))
            start += width
        return found


def _product(factor: Sequence[Tensor]) -> Tensor:
    return factor[0] if len(factor) == 1 else factor[0] @ factor[1]
