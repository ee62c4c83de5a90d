"""A quantity of a transformer of many equal blocks, from the same transformer with few of them."""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_modules.blocks import blocks

Figures = tuple[int, ...]


def measure_few(
    transformer: nn.Module, period: int, measure: Callable[[], Figures]
) -> tuple[Figures, list[tuple[Figures, int]]]:
    """Measure a transformer with few blocks of each list of equal ones.

    The first and the last block of a list may differ from the others: both stay.

    Args:
        period: blocks at this distance from each other are treated alike.

    Returns:
        The result; and for each list the increase by `period` more blocks, and how often they are left out.
    """
    lists: dict[nn.ModuleList, int] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name in blocks(transformer)):
        found: Any = transformer.get_submodule(name)
        fewest = 2 + (len(found) - 2) % period
        if len(found) > fewest + period and len(set(map(_shape, found))) == 1:
            lists[found] = fewest

    def measured(longer: nn.ModuleList | None = None) -> Figures:
        whole = {found: found._modules for found in lists}
        try:
            for found, fewest in lists.items():
                count = fewest + period * (found is longer)
                found._modules = nn.ModuleList([*found[: count - 1], found[-1]])._modules
            return measure()
        finally:
            for found, modules in whole.items():
                found._modules = modules

    least = measured()
    growth = []
    for found, fewest in lists.items():
        increase = tuple(more - less for more, less in zip(measured(found), least, strict=True))
        growth.append((increase, (len(found) - fewest) // period))
    return least, growth


def _shape(block: nn.Module) -> tuple[Any, ...]:
    """Return what equal blocks have in common: their layers, and the shapes of their parameters."""
    parameters = block.named_parameters()
    return str(block), *((name, one.shape, one.dtype, one.requires_grad) for name, one in parameters)
