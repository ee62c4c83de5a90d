"""A quantity of a transformer of many equal blocks, from the same transformer with few of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import nn

from lightning_modules.blocks import block_lists, blocks


class Growth(NamedTuple):
    """Increase of each measured quantity by `period` more blocks of a list, and how often they are left out."""

    increase: tuple[int, ...]
    times: int


def measure_few(
    transformer: nn.Module, period: int, measure: Callable[[], tuple[int, ...]]
) -> tuple[tuple[int, ...], list[Growth]]:
    """Measure a transformer with few blocks; return the result, and how it grows with each list of equal blocks.

    The first and the last block of a list may differ from the others: both stay.

    Args:
        period: blocks at this distance from each other are treated alike.
    """
    lists = [
        (found, list(found), 2 + (len(found) - 2) % period)
        for found in block_lists(transformer).values()
        if _are_equal(found)
    ]
    lists = [(found, whole, fewest) for found, whole, fewest in lists if len(whole) > fewest + period]
    saved = sum(len(whole) - fewest for _, whole, fewest in lists)
    if len(blocks(transformer)) <= (len(lists) + 1) * (len(blocks(transformer)) - saved) + len(lists) * period:
        lists = []
    with ExitStack() as few:
        for found, whole, fewest in lists:
            few.enter_context(_only(found, whole, fewest))
        least, growth = measure(), []
        for found, whole, fewest in lists:
            with _only(found, whole, fewest + period):
                increase = tuple(more - less for more, less in zip(measure(), least, strict=True))
            growth.append(Growth(increase, (len(whole) - fewest) // period))
    return least, growth


@contextmanager
def _only(found: nn.ModuleList, whole: list[nn.Module], count: int) -> Iterator[None]:
    """Temporarily leave the first blocks and the last in a list."""
    present, found._modules = found._modules, {str(at): one for at, one in enumerate([*whole[: count - 1], whole[-1]])}
    try:
        yield
    finally:
        found._modules = present


def _are_equal(found: nn.ModuleList) -> bool:
    """Return whether all blocks have the same layers, with parameters of the same shapes."""
    return (
        len(
            {
                (
                    str(block),
                    *((name, one.shape, one.dtype, one.requires_grad) for name, one in block.named_parameters()),
                )
                for block in found
            }
        )
        == 1
    )
