"""The LoKr adapter: updates that are Kronecker products."""

from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.adapters.factored import Factored
from lightning_modules.adapters.kronecker import Kronecker


class LoKr(Factored):
    """Updates kron(w1, w2) of linear layers (arXiv 2309.14859, section 3.2).

    w1 is whole and drawn as PyTorch does a linear layer's weight, w2 a product of two matrices whose second is zero, or
    whole and zero: LyCORIS' start.

    Args:
        rank: of w2; where it is no less than half of w2's larger side, w2 is whole.
        alpha: the update is scaled by alpha / rank, unless full_matrix; None stands for rank.
        decompose_factor: the sides of w1, as near as a layer's own can be divided; -1 for the most even division.
        full_matrix: whether both are whole, whatever the rank is.
        updates: of `LinearUpdates`.
    """

    kind = "LoKr"

    def __init__(
        self,
        rank: int,
        alpha: float | None,
        decompose_factor: int,
        full_matrix: bool,
        **updates: Any,
    ) -> None:
        super().__init__(**updates)
        if decompose_factor == 0:
            raise UserError("adapter.decompose_factor=0: choose -1 or a number from 1")
        self.rank = rank
        self.alpha = rank if alpha is None else alpha
        self.decompose_factor = decompose_factor
        self.full_matrix = full_matrix
        self.scale = 1.0 if full_matrix else self.alpha / rank

    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Kronecker:
        sides = [divided(side, self.decompose_factor) for side in (out_features, in_features)]
        (left, right) = zip(*sides, strict=True)
        first = drawn(left, generator)
        # peft's condition: diffusers finds the shapes by it.
        if self.full_matrix or self.rank >= max(right) / 2:
            return Kronecker([first], [torch.zeros(right)])
        rows, columns = right
        return Kronecker([first], [drawn((rows, self.rank), generator), torch.zeros(self.rank, columns)])

    def metadata(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("decompose_factor", "full_matrix")}
        return super().metadata() | own | ({} if self.full_matrix else {"rank": self.rank, "alpha": self.alpha})

    def __str__(self) -> str:
        rank = "whole factors" if self.full_matrix else f"rank {self.rank}, alpha {self.alpha:g}"
        return f"LoKr {rank}, factor {self.decompose_factor}"


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """As PyTorch draws a linear layer's weight."""
    return nn.init.kaiming_uniform_(torch.empty(shape), a=5**0.5, generator=generator)


def divided(side: int, factor: int) -> tuple[int, int]:
    """A number as a product (small, large), as peft's `factorization` and LyCORIS have it.

    Args:
        factor: the small one where it divides the number, else the largest it may be; -1 for no bound.
    """
    if factor > 0 and side % factor == 0:
        return factor, side // factor
    most = side if factor == -1 else factor
    small = max(one for one in range(1, min(most, int(side**0.5)) + 1) if side % one == 0)
    return small, side // small
