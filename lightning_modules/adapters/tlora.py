"""T-LoRA (arXiv 2507.05964): a LoRA whose rank follows the timestep, to learn from one image or a few."""

from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from datamodules.errors import UserError, listing
from lightning_modules.adapters.lora import LoRA
from lightning_modules.adapters.peft_layers import ADAPTER
from lightning_modules.adapters.rank_mask import RankGate
from lightning_modules.adapters.rank_schedule import RankSchedule
from lightning_modules.family import ALIKE, Layers

WITHOUT_SCHEDULE = "a loader that does not apply rank_schedule uses the full rank at every timestep"


class TLoRA(LoRA):
    """A LoRA whose rank follows the timestep.

    Args:
        min_rank, alpha_rank_scale, rank_schedule: of `RankSchedule`.
        lora: of `LoRA`.
    """

    def __init__(self, min_rank: int, alpha_rank_scale: float, rank_schedule: Any, **lora: Any) -> None:
        super().__init__(**lora)
        if self.ranks.rank_pattern:
            raise UserError("adapter.rank_pattern: a T-LoRA's schedule has one rank. Leave it out.")
        self.schedule = RankSchedule(rank_schedule, self.rank, min_rank, alpha_rank_scale)
        self.gate = RankGate(self.schedule, self.width)

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        super().inject(transformer, layers)
        self.gate.attach(transformer, ADAPTER)

    def resolve_targets(self, transformer: nn.Module, layers: Layers) -> list[str]:
        targets = super().resolve_targets(transformer, layers)
        if unmaskable := [name for name in targets if any(fnmatchcase(name, one) for one in layers.flattened)]:
            raise UserError(
                f"adapter.target_modules: {listing(unmaskable)} sees the tokens of a whole batch as one row, so "
                "a T-LoRA cannot mask single samples. Leave it out."
            )
        return targets

    def bind_rank_mask(self, block: nn.Module) -> Callable[..., Any]:
        return self.gate.bind(block)

    def rank_gates(self) -> list[RankGate]:
        return [self.gate]

    def metadata(self) -> dict[str, Any]:
        schedule = {**asdict(self.schedule), "width": self.width, "note": WITHOUT_SCHEDULE}
        return super().metadata() | {"rank_schedule": schedule}

    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        return [
            *super().loading_code(weights, pipeline_name),
            "from lightning_modules.adapters.rank_mask import attach_rank_schedule",
            f"attach_rank_schedule(pipe, {weights!r})",
        ]

    def __str__(self) -> str:
        return f"T-LoRA rank {self.schedule.min_rank} to {self.rank} ({self.schedule.kind})"
