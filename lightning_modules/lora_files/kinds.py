"""The other kinds of deltas that files hold (LoKr, LoHa), and the delta of any layer's tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_modules.lora_files.delta import Delta, LowRank, swap_halves


class Kronecker(Delta):
    """LoKr (arXiv 2309.14859, section 3.2): the delta `kron(w1, w2)`, or some of its rows.

    Args:
        left: w1 (l, m), or its two factors (l, r) and (r, m).
        right: w2 (k, n), or its two factors: the product is (l k, m n).
        rows: number of rows to skip, and number of rows to keep after them; None for all.
    """

    kind = "LoKr"
    parts = tuple(f"lokr_{name}{end}" for name in ("w1", "w2") for end in ("", "_a", "_b"))

    def __init__(self, left: Sequence[Tensor], right: Sequence[Tensor], rows: tuple[int, int] | None = None) -> None:
        self.left, self.right, self.rows = tuple(left), tuple(right), rows
        self.unwritable = "" if rows is None else "some rows of a Kronecker product are not a Kronecker product"

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        names = ("lokr_w1", "lokr_w2")
        factors = [
            [tensors[name]] if name in tensors else [tensors[f"{name}_a"], tensors[f"{name}_b"]] for name in names
        ]
        if any(name in tensors and f"{name}_a" in tensors for name in names):
            raise ValueError("a factor twice, whole and as a product")
        shapes = [tuple(one.shape) for factor in factors for one in factor]
        inner = [factor[0].shape[-1] == factor[-1].shape[0] for factor in factors if len(factor) == 2]
        if not all(len(shape) == 2 and min(shape) > 0 for shape in shapes) or not all(inner):
            raise ValueError(f"matrices of {' and '.join(map(str, shapes))}")
        return cls(factors[0], factors[1])

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, factor in (("lokr_w1", self.left), ("lokr_w2", self.right)):
            names = [name] if len(factor) == 1 else [f"{name}_a", f"{name}_b"]
            found |= dict(zip(names, factor, strict=True))
        return found

    def like(self, tensors: Mapping[str, Tensor]) -> Self:
        other = self.from_tensors(tensors)
        return type(self)(other.left, other.right, self.rows)

    @property
    def shape(self) -> tuple[int, int]:
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
        # Loaders ignore alpha if both factors are whole (lycoris/modules/lokr.py).
        return next((factor[1].shape[0] for factor in (self.right, self.left) if len(factor) == 2), None)

    def scaled(self, factor: float) -> Self:
        return type(self)((self.left[0] * factor, *self.left[1:]), self.right, self.rows)

    def apply(self, x: Tensor) -> Tensor:
        """Compute two small products: kron(w1, w2) x is w1 X w2^T, with x as a matrix X (m, n)."""
        y = x.unflatten(-1, (self.left[-1].shape[1], self.right[-1].shape[1]))
        for factor in (self.right, self.left):
            for matrix in reversed(factor):
                y = F.linear(y, matrix)
            y = y.transpose(-1, -2)  # (..., m, k) -> (..., k, m), then (..., k, l) -> (..., l, k)
        y = y.flatten(-2)
        return y if self.rows is None else y.narrow(-1, *self.rows)

    def matrix(self) -> Tensor:
        product = torch.kron(_product(self.left).contiguous(), _product(self.right).contiguous())
        return product if self.rows is None else product.narrow(0, *self.rows)

    def square(self) -> float:
        if self.rows is not None:
            return super().square()
        left, right = (float(_product(factor).double().square().sum()) for factor in (self.left, self.right))
        return left * right

    def split(self, widths: Sequence[int], swapped: bool) -> list["Kronecker"]:
        """Give each sub-layer the rows of w1 that reach it, and its rows of that product."""
        height = self.right[0].shape[0]
        first, *rest = self.left
        if swapped:
            if len(first) % 2 or self.rows is not None:
                raise ValueError("a Kronecker product whose halves cannot be swapped")
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


class Hadamard(Delta):
    """LoHa (FedPara, arXiv 2108.06098): the elementwise product `(w1_a @ w1_b) * (w2_a @ w2_b)`.

    Args:
        ups: w1_a (out, r) and w2_a (out, s).
        downs: w1_b (r, in) and w2_b (s, in).
    """

    kind = "LoHa"
    parts = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")

    def __init__(self, ups: Sequence[Tensor], downs: Sequence[Tensor]) -> None:
        self.ups, self.downs = tuple(ups), tuple(downs)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        factors = [tensors[name] for name in cls.parts]
        ups, downs, shapes = factors[::2], factors[1::2], [tuple(one.shape) for one in factors]
        flat = all(len(shape) == 2 and min(shape) > 0 for shape in shapes)
        fit = flat and all(up.shape[1] == down.shape[0] for up, down in zip(ups, downs, strict=True))
        if not fit or len(ups[0]) != len(ups[1]) or downs[0].shape[1] != downs[1].shape[1]:
            raise ValueError(f"matrices of {' and '.join(map(str, shapes))}")
        return cls(ups, downs)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.parts, (self.ups[0], self.downs[0], self.ups[1], self.downs[1]), strict=True))

    @property
    def shape(self) -> tuple[int, int]:
        return self.ups[0].shape[0], self.downs[0].shape[1]

    @property
    def size(self) -> str:
        return " by ".join(dict.fromkeys(str(len(down)) for down in self.downs))

    @property
    def divisor(self) -> int:
        return len(self.downs[0])

    def scaled(self, factor: float) -> Self:
        return type(self)((self.ups[0] * factor, self.ups[1]), self.downs)

    def apply(self, x: Tensor) -> Tensor:
        """Multiply by a sum of r s components if that is smaller than the matrix, which each step would store."""
        if len(self.downs[0]) * len(self.downs[1]) >= min(self.shape):
            return F.linear(x, self.matrix())
        up = (self.ups[0].unsqueeze(2) * self.ups[1].unsqueeze(1)).flatten(1)
        down = (self.downs[0].unsqueeze(1) * self.downs[1].unsqueeze(0)).flatten(0, 1)
        return F.linear(F.linear(x, down), up)

    def matrix(self) -> Tensor:
        one, other = (up @ down for up, down in zip(self.ups, self.downs, strict=True))
        return one * other

    def split(self, widths: Sequence[int], swapped: bool) -> list["Hadamard"]:
        pieces = [swap_halves(up, swapped).split(list(widths)) for up in self.ups]
        return [Hadamard(ups, self.downs) for ups in zip(*pieces, strict=True)]


DELTA_KINDS: tuple[type[Delta], ...] = (LowRank, Kronecker, Hadamard)


def matching_kinds(parts: Collection[str]) -> list[type[Delta]]:
    """Return the kinds of deltas that some of a layer's tensors belong to."""
    return [kind for kind in DELTA_KINDS if set(kind.parts) & set(parts)]


def make_delta(tensors: Mapping[str, Tensor]) -> Delta:
    """Build the delta of a layer's tensors; raises ValueError for a form that Retouch does not read."""
    kind, *others = matching_kinds(tensors)
    if others:
        raise ValueError(f"{' and '.join(sorted(tensors))}, of two kinds of adapters")
    try:
        return kind.from_tensors(tensors)
    except KeyError as error:
        raise ValueError(f"only {' and '.join(sorted(tensors))}, half of an update") from error


def common_kind(deltas: Iterable[Delta]) -> str:
    """Return the kind of adapter that these deltas form together."""
    return next((delta.kind for delta in deltas if delta.kind != "LoRA"), "LoRA")
