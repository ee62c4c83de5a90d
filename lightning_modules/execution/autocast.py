"""What autocast computes in, and sparing it copies."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.execution.blocks import blocks


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in: autocast's dtype, or its input's."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, products there are in the dtypes of what is multiplied."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def cast_inputs_once(transformer: nn.Module) -> None:
    """Let what attends have its inputs in the dtype that it computes in, and so its queries and keys beside its values.

    Norms give float32 under autocast: each layer behind one would make and keep a copy of its own, and few kernels of
    attention take what differs.
    """

    def cast(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        floats = {k: x for k, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        return args, kwargs | {name: x.to(compute_dtype(x)) for name, x in floats.items()}

    def cast_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.to(compute_dtype(output))

    parts: list[Any] = list(blocks(transformer).values())
    attentions = [block.attn if hasattr(block, "attn") else block.attention for block in parts]
    for attention in attentions:
        attention.register_forward_pre_hook(cast, with_kwargs=True)
        for name, norm in attention.named_children():
            if name.startswith("norm_"):  # of queries and keys
                norm.register_forward_hook(cast_output)
