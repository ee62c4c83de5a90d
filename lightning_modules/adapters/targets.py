"""The linear layers that an adapter adapts, with the rank and the scale of each layer's update."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from foundation.errors import UserError, listing
from foundation.files import reading
from lightning_modules.family import Layers
from lightning_modules.lora_files.reading import NAME_ANOTHER, LoRAFile

PATTERNS = ("rank_pattern", "alpha_pattern")


def resolve_targets(transformer: nn.Module, layers: Layers, target_modules: Sequence[str] | str | None) -> list[str]:
    """Return the names of the linear layers to adapt, in the transformer's order.

    Args:
        layers: the family's layers.
        target_modules: endings of layer names (without `Layers.flattened` if there are others), a regular expression
            for the whole name, or `all-linear` (every linear layer except the family's `Layers.output` and
            `flattened`); None for the family's endings.
    """
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    if target_modules == "all-linear":
        return _without(linear, (layers.output, *layers.flattened))
    modules = list(layers.targets) if target_modules is None else target_modules
    if not modules:
        raise UserError("adapter.target_modules=[]: no layer would be adapted. Use null for the default.")
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    targets: set[str] = set()
    for one in [modules] if isinstance(modules, str) else [[name] for name in modules]:
        config = LoraConfig(target_modules=one)
        try:
            found = [name for name in linear if check_target_module_exists(config, name)]
        except re.error as error:
            raise UserError(f"adapter.target_modules={modules} is not a regular expression: {error}") from error
        if not found:
            endings = sorted({ending(name) for name in linear})
            raise UserError(
                f"adapter.target_modules: {one if isinstance(one, str) else one[0]} matches no linear layer of "
                f"{type(transformer).__name__}. Its layers end with {', '.join(endings)}."
            )
        targets.update(found if isinstance(one, str) else _without(found, layers.flattened) or found)
    return [name for name in linear if name in targets]


def _without(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def last_match(patterns: dict[str, float], name: str, default: float) -> float:
    return next((value for pattern, value in reversed(patterns.items()) if fnmatchcase(name, pattern)), default)


def require_matches(setting: str, patterns: Mapping[str, float], names: Collection[str]) -> None:
    """Raise a UserError for a pattern of a setting that matches no layer."""
    for pattern, value in patterns.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            own = dict.fromkeys(re.sub(r"\.\d+\..*", ".*", name) for name in names)
            known = listing(sorted(own, key=lambda one: not one.endswith("*")), 6)
            raise UserError(f"{setting}={{{pattern}:{value:g}}} matches no layer of the adapter. It has {known}.")


def ending(name: str) -> str:
    """Return the part of a layer's name that repeats from block to block, `attn.to_q` of `blocks.0.attn.to_q`."""
    return re.sub(r"^[a-z_.]+?\.\d+\.", "", name)


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
