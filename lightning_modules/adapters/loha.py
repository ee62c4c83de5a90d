"""The LoHa adapter: updates that are products, number by number, of two low-rank ones."""

from typing import Any

import torch

from lightning_modules.adapters.factored import Factored
from lightning_modules.adapters.hadamard import Hadamard


class LoHa(Factored):
    """Updates (w1_a w1_b) * (w2_a w2_b) of linear layers (FedPara, arXiv 2108.06098): of a rank up to rank^2.

    Numbers are drawn as by LyCORIS: standard deviations of 0.1 and 1 in the first product, zero and 1 in the second.

    Args:
        rank: of both products.
        alpha: the update is scaled by alpha / rank; None stands for rank.
        updates: of `LinearUpdates`.
    """

    kind = "LoHa"

    def __init__(
        self,
        rank: int,
        alpha: float | None,
        **updates: Any,
    ) -> None:
        super().__init__(**updates)
        self.rank = rank
        self.alpha = rank if alpha is None else alpha
        self.scale = self.alpha / rank

    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Hadamard:
        up = 0.1 * torch.randn(out_features, self.rank, generator=generator)
        downs = [torch.randn(self.rank, in_features, generator=generator) for _ in range(2)]
        return Hadamard((up, torch.zeros(out_features, self.rank)), downs)

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"rank": self.rank, "alpha": self.alpha}

    def __str__(self) -> str:
        return f"LoHa rank {self.rank}, alpha {self.alpha:g}"
