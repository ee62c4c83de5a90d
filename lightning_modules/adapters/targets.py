"""The linear layers that an adapter adapts, and settings of some layers by patterns of their names."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from foundation.errors import UserError, listing
from lightning_modules.family import Layers


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
    """Return the value of the last pattern that matches a layer's name."""
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
