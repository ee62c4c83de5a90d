"""The blocks of a transformer: finding them, and dtypes under autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError


def blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks by name, in the order of their lists, in which most transformers compute them."""
    found: dict[str, nn.Module] = {}
    for name, part in transformer.named_children():
        inner = dict(part.named_children()) if isinstance(part, nn.ModuleList) else {}
        inner |= blocks(part) if isinstance(part, nn.ModuleDict) else {}  # of lists
        found |= {f"{name}.{index}": block for index, block in inner.items()}
    return found


def streamed_blocks(transformer: nn.Module, count: int) -> dict[str, nn.Module]:
    """Return `count` evenly spread blocks, copied while others compute; raise a UserError if there are fewer."""
    names = list(found := blocks(transformer))
    if not isinstance(count, int) or not 0 <= count <= len(names):
        raise UserError(f"model.offload.blocks={count}: {type(transformer).__name__} has 0 to {len(names)}")
    chosen = [names[index * len(names) // count] for index in range(count)]
    return {name: found[name] for name in chosen}


def repeatable(run: Callable[..., Any], *attributes: tuple[Any, str]) -> Callable[..., Any]:
    """Return a function whose later calls find attributes, given as (owner, name), as the first call left them."""
    left: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not left:
            result = run(*args, **kwargs)
            left.extend(getattr(owner, name) for owner, name in attributes)
            return result
        present = [getattr(owner, name) for owner, name in attributes]
        for (owner, name), value in zip(attributes, left, strict=True):
            setattr(owner, name, value)
        try:
            return run(*args, **kwargs)
        finally:
            for (owner, name), value in zip(attributes, present, strict=True):
                setattr(owner, name, value)

    return call


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes: autocast's, or its input's."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Temporarily compute products in the dtypes of their operands."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def cast_inputs_once(transformer: nn.Module) -> None:
    """Cast the inputs of attention, and its normalised queries and keys, to the dtype in which attention computes.

    Norms return float32 under autocast: each linear layer after one would make and keep its own copy, and few attention
    kernels take queries, keys and values of different dtypes.
    """

    def cast(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        floats = {k: x for k, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        return args, kwargs | {name: x.to(compute_dtype(x)) for name, x in floats.items()}

    def cast_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.to(compute_dtype(output))

    parts: list[Any] = list(blocks(transformer).values())
    kept = getattr(transformer, "_keep_in_fp32_modules", None) or ()  # those cast their outputs back themselves
    for attention in [block.attn if hasattr(block, "attn") else block.attention for block in parts]:
        attention.register_forward_pre_hook(cast, with_kwargs=True)
        for name, norm in attention.named_children():
            if name.startswith("norm_") and name not in kept:  # of queries and keys
                norm.register_forward_hook(cast_output)
