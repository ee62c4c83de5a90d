"""Which of a transformer's linear layers an adapter adapts, and settings of some of them by patterns of their names."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from datamodules.errors import UserError, listing
from lightning_modules.layers import Layers

# transformer_blocks.0-9
BLOCK_RANGE = re.compile(r"(.+)\.(\d+)-(\d+)", re.ASCII)


def resolve_targets(
    transformer: nn.Module,
    layers: Layers,
    target_modules: Sequence[str] | str | None,
    within: Sequence[str] | None = None,
) -> list[str]:
    """The names of the linear layers to adapt, in the transformer's order.

    Args:
        layers: the family's.
        target_modules: names that layers end with, a regular expression for the whole name, or `all-linear` (every
            linear layer but the family's `Layers.output` and `flattened`); None for the family's.
        within: block ranges (`transformer_blocks.0-9`), names or patterns: of these layers alone; None for all.

    Raises:
        UserError: target_modules or one of `within` matches nothing.
    """
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    if target_modules == "all-linear":
        left_out = (layers.output, *layers.flattened)
        targets = [name for name in linear if not any(fnmatchcase(name, pattern) for pattern in left_out)]
    else:
        modules = list(layers.targets) if target_modules is None else target_modules
        targets = _named(linear, modules, type(transformer).__name__)
    if not targets or within == []:
        setting = "adapter.layers" if within == [] else "adapter.target_modules"
        raise UserError(f"{setting}=[] adapts no layer: null stands for the usual ones")
    if within is None:
        return targets
    for one in within:
        if not any(is_within(name, one) for name in targets):
            raise UserError(
                f"adapter.layers: {one} matches none of the layers that adapter.target_modules names; these are in "
                f"{', '.join(block_ranges(targets))}"
            )
    return [name for name in targets if any(is_within(name, one) for one in within)]


def as_names(given: Sequence[str] | str | None) -> list[str] | None:
    """A setting of one name or several, as a list; None stays."""
    return None if given is None else [given] if isinstance(given, str) else list(map(str, given))


def is_within(name: str, one: str) -> bool:
    """Whether a layer is in a range of blocks, has this name or one that begins with it, or matches the pattern."""
    if found := BLOCK_RANGE.fullmatch(one):
        start, first, last = found.groups()
        number = name.removeprefix(f"{start}.").partition(".")[0]
        return name.startswith(f"{start}.") and number.isdigit() and int(first) <= int(number) <= int(last)
    return name == one or name.startswith(f"{one}.") or fnmatchcase(name, one)


def _matching(targets: list[str] | str, names: Iterable[str]) -> list[str]:
    """The layers, by their full names, that peft takes as targets; raises re.error for no regular expression."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=targets)
    return [name for name in names if check_target_module_exists(config, name)]


def last_match(patterns: dict[str, float], name: str, default: float) -> float:
    """What the last of the patterns that matches a layer's name gives it."""
    return next((value for pattern, value in reversed(patterns.items()) if fnmatchcase(name, pattern)), default)


def require_matches(setting: str, patterns: Mapping[str, float], names: Collection[str]) -> None:
    """Raise a UserError for a pattern that matches no layer of these.

    Args:
        setting: that holds the patterns.
    """
    for pattern, value in patterns.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            own = dict.fromkeys(re.sub(r"\.\d+\..*", ".*", name) for name in names)
            known = listing(sorted(own, key=lambda one: not one.endswith("*")), 6)
            raise UserError(f"{setting}={{{pattern}:{value:g}}} matches no layer of the adapter; it has {known}")


def block_ranges(names: Iterable[str]) -> list[str]:
    """Names of layers -> the blocks that they are in, as `transformer_blocks.0-18`; others as they are."""
    blocks: dict[str, list[int]] = {}
    for name in names:
        start, *rest = re.split(r"\.(\d+)\.", name, maxsplit=1)
        blocks.setdefault(start, []).extend(int(number) for number in rest[:1])
    return [f"{start}.{min(found)}-{max(found)}" if found else start for start, found in blocks.items()]


def _named(linear: Sequence[str], modules: Sequence[str] | str, transformer: str) -> list[str]:
    """The layers that names or a regular expression mean."""
    targets: dict[str, None] = {}
    for one in [modules] if isinstance(modules, str) else [[name] for name in modules]:
        try:
            found = _matching(one, linear)
        except re.error as error:
            raise UserError(f"adapter.target_modules={modules} is no regular expression: {error}") from error
        if not found:
            endings = sorted({ending(name) for name in linear})
            raise UserError(
                f"adapter.target_modules: {one if isinstance(one, str) else one[0]} matches no linear layer of "
                f"{transformer}; it has layers that end with {', '.join(endings)}"
            )
        targets.update(dict.fromkeys(found))
    return [name for name in linear if name in targets]


def ending(name: str) -> str:
    """Return the part of a layer's name that repeats from block to block, `attn.to_q` of `blocks.0.attn.to_q`."""
    parts = name.split(".")
    blocks = [i for i, part in enumerate(parts) if part.isdigit() and i < 2]
    return ".".join(parts[blocks[0] + 1 :] if blocks else parts)
