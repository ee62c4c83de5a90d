"""The other kinds of deltas that files hold (LoKr, LoHa, OFT), and the delta of any layer's tensors."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


class Rotation(Delta):
    """OFT (arXiv 2306.07280, as in peft and OFTv2, arXiv 2506.19847): a rotation x -> x R of the layer's input.

    R has blocks on its diagonal, and W becomes W R^T.

    Args:
        skew: (blocks, b (b - 1) / 2), the entries above the diagonal of each block's Q = -Q^T.
    """

    kind = "OFT"
    parts = ("oft_R",)

    def __init__(self, skew: Tensor) -> None:
        self.skew = skew

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        skew = tensors["oft_R"]
        if skew.ndim != 2 or len(skew) == 0 or skew_entries(_block_size(skew)) != skew.shape[1]:
            raise ValueError(f"a matrix of {tuple(skew.shape)}")
        return cls(skew)

    def tensors(self) -> dict[str, Tensor]:
        return {"oft_R": self.skew}

    @property
    def shape(self) -> tuple[None, int]:
        return None, len(self.skew) * _block_size(self.skew)

    @property
    def size(self) -> str:
        return f"{len(self.skew)} blocks of {_block_size(self.skew)}"

    @property
    def divisor(self) -> None:
        return None

    def scaled(self, factor: float) -> Self:
        """Multiply Q by a factor: -1 inverts the rotation, 0 is none."""
        return type(self)(self.skew * factor)

    def turns(self) -> Tensor:
        """Compute R - 1 of each block, (blocks, b, b).

        R is Cayley's (1 + Q) / (1 - Q), by the first terms of its series as in peft: 1 + 2 Q + 2 Q^2 + 2 Q^3 + Q^4.
        """
        q = skew_symmetric(self.skew)
        q2 = q @ q
        return 2 * q + 2 * q2 + 2 * (q2 @ q) + q2 @ q2

    def apply(self, x: Tensor) -> Tensor:
        """Compute the change of the layer's input, x R - x."""
        turns = self.turns()
        blocks = x.unflatten(-1, turns.shape[:2])
        return torch.einsum("...rk,rkc->...rc", blocks, turns.to(x.dtype)).flatten(-2)

    def forward(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return layer(x + self.apply(self.cast(x)).to(x.dtype))

    def matrix(self) -> Tensor:
        """Return (R - 1)^T (in, in)."""
        return torch.block_diag(*self.turns().transpose(1, 2))

    def updated(self, weight: Tensor) -> Tensor:
        weight, turns = weight.float(), self.to(torch.float32, weight.device).turns()
        blocks = weight.unflatten(1, turns.shape[:2])
        return weight + torch.einsum("orc,rkc->ork", blocks, turns).flatten(1)

    def square(self) -> float:
        return float(self.turns().double().square().sum())

    def reduced(self, rank: int) -> LowRank:
        raise ValueError("an OFT rotates a layer's inputs, and no LoRA is close to a rotation")

    def split(self, widths: Sequence[int], swapped: bool) -> "list[Rotation]":
        """Give each sub-layer the whole rotation: they share their input."""
        return [self] * len(widths)


def skew_entries(size: int) -> int:
    """Return the number of entries above the diagonal of a square matrix."""
    return size * (size - 1) // 2


def skew_symmetric(above: Tensor) -> Tensor:
    """Build matrices (B, b, b) from the entries above their diagonals (B, b (b - 1) / 2), row by row."""
    size = _block_size(above)
    rows, columns = torch.triu_indices(size, size, 1, device=above.device)
    flat = above.new_zeros(len(above), size * size).index_copy(1, rows * size + columns, above)
    upper = flat.view(-1, size, size)
    return upper - upper.transpose(1, 2)


def _block_size(skew: Tensor) -> int:
    return (1 + math.isqrt(1 + 8 * skew.shape[-1])) // 2


DELTA_KINDS: tuple[type[Delta], ...] = (LowRank, Kronecker, Hadamard, Rotation)


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
