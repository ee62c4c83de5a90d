"""The rank and the scale of each layer's update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foundation.errors import UserError
from foundation.files import reading
from lightning_modules.adapters.targets import last_match, require_matches
from lightning_modules.lora_files.reading import NAME_ANOTHER, LoRAFile

PATTERNS = ("rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class Ranks:
    """Ranks and scales of an adapter's layers.

    Args:
        rank: r, the width of the bottleneck.
        alpha: the update is scaled by alpha / r.
        use_rslora: scale by alpha / sqrt(r) instead (arXiv 2312.03732).
        rank_pattern, alpha_pattern: ranks and alphas of layers, by patterns of diffusers' layer names; the last match
            counts.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, float] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_file(cls, file: LoRAFile) -> "Ranks | None":
        """Return the ranks and alphas that a file was trained with; None for other programs' files."""
        with reading(file.path, NAME_ANOTHER):
            return cls.of_header(file.adapter)

    @classmethod
    def of_header(cls, adapter: Mapping[str, Any]) -> "Ranks | None":
        """Return the ranks and alphas of a file's header; None if it has none."""
        rank, alpha = float(adapter.get("rank", 0)), float(adapter.get("alpha", 0))
        if not (rank > 0 and alpha > 0):
            return None
        found = cls(
            int(rank),
            alpha,
            bool(adapter.get("use_rslora")),
            *({key: float(value) for key, value in (adapter.get(name) or {}).items()} for name in PATTERNS),
        )
        if any(not 0 < value < math.inf for value in (*found.rank_pattern.values(), *found.alpha_pattern.values())):
            raise ValueError("its ranks and alphas must be above 0")
        return found

    def rank_of(self, layer: str) -> int:
        return int(last_match(self.rank_pattern, layer, self.rank))

    def alpha_of(self, layer: str) -> float:
        return last_match(self.alpha_pattern, layer, self.alpha)

    def scale_of(self, layer: str) -> float:
        rank = self.rank_of(layer)
        return self.alpha_of(layer) / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def scale(self) -> float | None:
        """The factor of all layers; None if patterns may make them differ."""
        return None if self.rank_pattern or self.alpha_pattern else self.scale_of("")

    def check(self, sides: Mapping[str, int]) -> None:
        """Raise a UserError for patterns without a match, and for ranks above any layer's smaller size."""
        require_matches("adapter.rank_pattern", self.rank_pattern, sides)
        require_matches("adapter.alpha_pattern", self.alpha_pattern, sides)
        ranks = {layer: self.rank_of(layer) for layer in sides}
        for rank in dict.fromkeys(ranks.values()):
            largest = max(side for layer, side in sides.items() if ranks[layer] == rank)
            if rank > largest:
                setting = f"adapter.rank={rank}" if rank == self.rank else f"adapter.rank_pattern: {rank}"
                raise UserError(f"{setting}: the layers with this rank allow at most {largest}. Lower it.")

    def metadata(self) -> dict[str, Any]:
        """Return the settings for a file's header, without unset ones."""
        others = {name: getattr(self, name) for name in ("use_rslora", *PATTERNS)}
        return {"rank": self.rank, "alpha": self.alpha} | {name: value for name, value in others.items() if value}

    def __str__(self) -> str:
        others = [f"{rank:g}" for rank in dict.fromkeys(self.rank_pattern.values()) if rank != self.rank]
        return f"{self.rank}" + (f" (of some layers {', '.join(others)})" if others else "")
