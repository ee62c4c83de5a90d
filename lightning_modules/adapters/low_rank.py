"""A layer's low-rank update, and what can be computed of it without making the whole matrix."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.errors import UserError
from lightning_modules.adapters.update import Unread, Update


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
    def kind(self) -> str:
        """As of `Update`, and so are the others."""
        return "LoRA"

    @property
    def unwritable(self) -> str:
        return ""

    @classmethod
    def is_complete(cls, parts: Collection[str]) -> bool:
        return {"down", "up"} <= set(parts)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "LowRank":
        down, up = tensors["down"], tensors["up"]
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1] or len(down) == 0:
            raise ValueError(f"matrices of {tuple(down.shape)} and {tuple(up.shape)}")
        magnitude, rows = tensors.get("magnitude"), len(up)
        if magnitude is not None and magnitude.shape == (1, down.shape[1]) != (rows, 1):
            raise Unread("a DoRA's magnitude for each input, as OneTrainer has unless told otherwise; Retouch reads "
                         "one for each output")  # fmt: skip
        if magnitude is not None and magnitude.shape not in ((rows,), (rows, 1)):  # ComfyUI has a column
            raise ValueError(f"a magnitude of {tuple(magnitude.shape)} for {rows} outputs")
        return cls(down, up, None if magnitude is None else magnitude.flatten())

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}

    def like(self, tensors: Mapping[str, Tensor]) -> "LowRank":
        return self.of(tensors)

    @property
    def sides(self) -> tuple[int, int]:
        return self.up.shape[0], self.down.shape[1]

    @property
    def size(self) -> str:
        return str(self.rank)

    @property
    def divisor(self) -> int:
        return self.rank

    @property
    def rank(self) -> int:
        """How many components it has."""
        return self.down.shape[0]

    def scaled(self, factor: float) -> "LowRank":
        """The same, times a number."""
        return self._replace(up=self.up * factor)

    def to(self, dtype: torch.dtype) -> "LowRank":
        """As it is when its numbers are kept in another dtype; a magnitude stays as it is, as in files."""
        return LowRank(self.down.to(dtype), self.up.to(dtype), self.magnitude)

    def apply(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return x @ self.down.T @ self.up.T

    def delta(self) -> Tensor:
        return self.up @ self.down

    def updated(self, weight: Tensor) -> Tensor:
        """W + up down in float32, DoRA's rows brought to their magnitudes (arXiv 2402.09353)."""
        wanted = weight.float() + self.up.to(weight.device) @ self.down.to(weight.device)
        if self.magnitude is not None:
            norms = wanted.norm(dim=1)
            wanted *= (self.magnitude.to(weight.device) / norms.where(norms > 0, 1.0))[:, None]
        return wanted

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

    def divided(self, widths: Sequence[int], swapped: bool) -> "list[LowRank | None]":
        """Of several layers each has the components that reach it; where there are none, it has no update.

        Raises:
            UserError: they are not what the whole is.
        """
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
        x = probe(self.down.shape[1])
        expected = swap_halves(self.apply(x), swapped)
        rows = [x.new_zeros(width) if one is None else one.apply(x) for one, width in zip(found, widths, strict=True)]
        if not torch.allclose(torch.cat(rows), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
            raise UserError("what was read of a layer that is several is not what the file holds; please report it")
        return found


def probe(in_features: int) -> Tensor:
    """The same random numbers each time, in the host's memory: updates that make the same of them are equal."""
    return torch.randn(in_features, generator=torch.Generator().manual_seed(0), device="cpu")


def swap_halves(rows: Tensor, swapped: bool = True) -> Tensor:
    """The second half of the rows before the first."""
    return torch.cat(rows.chunk(2)[::-1]) if swapped else rows


def inner(one: Update, other: Update) -> float:
    """The sum of the products of two updates' numbers, which are of the same layer."""
    if not isinstance(one, LowRank) or not isinstance(other, LowRank):
        return float((one.delta().double() * other.delta().double()).sum())
    downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, other.up)))
    return float(((ups[0].T @ ups[1]) * (downs[0] @ downs[1].T)).sum())


def minus(one: LowRank, other: LowRank) -> LowRank:
    """The difference of two updates, whose rank is the sum of theirs."""
    downs, ups = ([part.double() for part in parts] for parts in ((one.down, other.down), (one.up, other.up)))
    return LowRank(torch.cat(downs), torch.cat([ups[0], -ups[1]], dim=1))


def squared_difference(one: Update, other: Update) -> float:
    """`Update.square` of the difference of two updates of one layer."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        return max(minus(one, other).square(), 0.0)
    return float((one.delta().double() - other.delta().double()).square().sum())


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


def best_of_rank(matrix: Tensor, rank: int) -> tuple[LowRank, float]:
    """The update of a rank that is nearest to a matrix (out, in), and the square of the distance (Frobenius norm).

    By the eigenvectors of the smaller Gram matrix, in double precision: as exact as an SVD in single precision, and
    several times as fast. The singular values are shared by both factors, as trained LoRAs have them.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if tall else matrix).double()
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    kept = vectors[:, -rank:].flip(1)  # (side, rank), the largest first
    rest = kept.T @ wide
    lost = float((wide.square().sum() - rest.square().sum()).clamp_min(0))
    share = rest.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    left, right = kept * share, rest / share[:, None]
    down, up = (left.T, right.T) if tall else (right, left)
    return LowRank(down.float().cpu().contiguous(), up.float().cpu().contiguous()), lost


def relative_change(before: Mapping[str, Update], after: Mapping[str, Update]) -> float:
    """How much smaller or larger the difference is than the update: of all layers together, 0 where they are equal.

    A layer that is missing on one side has no update there.
    """
    whole = sum(one.square() for one in before.values())
    different = sum(squared_difference(one, after[name]) for name, one in before.items() if name in after)
    different += sum(before[name].square() for name in before.keys() - after.keys())
    different += sum(after[name].square() for name in after.keys() - before.keys())
    return (different / whole) ** 0.5 if whole else 0.0
