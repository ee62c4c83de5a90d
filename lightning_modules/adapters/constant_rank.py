"""A T-LoRA as a LoRA of one rank, for programs that know nothing of timesteps, and how far that is from it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.adapters.low_rank import LowRank
from lightning_modules.adapters.rank_mask import RankGate


class ActiveRanks(NamedTuple):
    """The ranks that a T-LoRA has in sampling.

    Attributes:
        gate: of the T-LoRA.
        ranks: (N,), of each sampling step.
    """

    gate: RankGate
    ranks: Tensor

    @classmethod
    def of(cls, gate: RankGate, timesteps: Tensor) -> "ActiveRanks":
        """Of all timesteps of a sampling, (N,)."""
        return cls(gate, gate.schedule.active_ranks(timesteps, timesteps))

    @property
    def mean(self) -> float:
        """Over the steps."""
        return float(self.ranks.float().mean())

    def first(self, updates: Mapping[str, LowRank], rank: int) -> dict[str, LowRank]:
        """The update that the mask leaves at a timestep of this rank: that of the first components."""
        return {name: update.first(rank * self.gate.width) for name, update in updates.items()}

    def difference(self, updates: Mapping[str, LowRank], rank: int) -> float:
        """How far the update of this rank is from the one that each sampling step has, relative to that; the mean.

        By the Frobenius norm over all layers; where no component works, relative to the update of this rank.
        """
        gram = torch.stack([update.gram() for update in updates.values()]).sum(dim=0)

        def norm(first: int, last: int) -> float:
            """Of the components from `first` on, before `last`."""
            part = slice(first * self.gate.width, last * self.gate.width)
            return float(gram[part, part].sum().clamp_min(0)) ** 0.5

        steps = []
        for active in self.ranks.tolist():
            different, whole = norm(*sorted((active, rank))), norm(0, active or rank)
            steps.append(different / whole if whole else 0.0)
        return sum(steps) / len(steps)
