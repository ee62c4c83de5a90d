"""The blocks of a transformer, and what runs one of them later."""

from collections.abc import Callable
from typing import Any

from torch import nn


def blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """Its repeated parts by name, in the order in which they compute."""
    lists = {name: part for name, part in transformer.named_children() if isinstance(part, nn.ModuleList)}
    return {f"{name}.{number}": block for name, part in lists.items() for number, block in enumerate(part)}


def with_attribute(owner: Any, attribute: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs later with an attribute as it is now, whatever it is then."""
    value = getattr(owner, attribute)

    def later(*args: Any) -> Any:
        present = getattr(owner, attribute)
        setattr(owner, attribute, value)
        try:
            return run(*args)
        finally:
            setattr(owner, attribute, present)

    return later
