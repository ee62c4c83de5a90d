"""The kernels that a transformer's blocks run: of attention, and compiled."""

from functools import partial
from typing import Any

import torch

from datamodules.errors import UserError
from datamodules.files import reason
from lightning_modules.execution.blocks import blocks
from lightning_modules.execution.last_block import LastBlock

# Kernels without a backward pass.
INFERENCE_ONLY = ("sage", "_sage")
# That a list of blocks may need: by sizes, by whether there is one sample, padding, or a gradient of the inputs.
GRAPHS = 16


def check_attention_backend(name: str | None, trains: bool = False) -> None:
    """Raise a UserError for an attention backend that diffusers does not know, or that cannot train."""
    if name is None:
        return
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise UserError(f"model.attention_backend={name}: diffusers has {', '.join(known)}")
    if trains and name.startswith(INFERENCE_ONLY):
        raise UserError(f"model.attention_backend={name} has no backward pass: use it in prediction only")


def set_attention_backend(transformer: Any, name: str | None) -> None:
    """Let diffusers dispatch attention to this kernel; None for PyTorch's own choice.

    Raises:
        UserError: it cannot be used on this machine.
    """
    if name is None:
        return
    from diffusers.models.attention_dispatch import attention_backend

    try:
        with attention_backend(name):  # the transformer's alone: diffusers would let all others follow
            transformer.set_attention_backend(name)
    except (ImportError, RuntimeError, ValueError) as error:
        first = reason(error)
        raise UserError(f"model.attention_backend={name} cannot be used here: {first}") from error


def compile_blocks(transformer: Any, dynamic: bool | None) -> None:
    """Compile what repeats, once for all that are alike.

    Their forwards and not their calls: hooks, by which blocks are streamed or gathered, stay outside.

    Args:
        dynamic: whether one graph serves all sizes; None makes one for the first size, and another when a second comes.
    """
    found = blocks(transformer)
    # Lists of blocks may be of one class, as Z-Image's three: their graphs, which differ, count as one function's.
    lists = len({name.partition(".")[0] for name in found})
    make = partial(torch.compile, fullgraph=True, dynamic=dynamic, recompile_limit=lists * GRAPHS)
    for block in found.values():
        forward = block.forward
        if isinstance(forward, LastBlock):
            forward.full, forward.compute = make(forward.full), make(forward.compute)
        else:
            block.forward = make(forward)
