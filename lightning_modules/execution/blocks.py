"""The blocks of a transformer: finding them, dtypes under autocast, kernels, and the last block's shortcut."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from datamodules.files import reason

# Attention kernels without a backward pass, or with a wrong one (cuDNN's).
INFERENCE_ONLY = ("sage", "_sage", "_native_cudnn")
# Graphs that a list of blocks may need: by sizes, single samples, padding, and gradients of the inputs.
GRAPHS = 16


def blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks by name, in the order of their lists, in which most transformers compute them."""
    found: dict[str, nn.Module] = {}
    for name, part in transformer.named_children():
        inner = dict(part.named_children()) if isinstance(part, nn.ModuleList) else {}
        inner |= blocks(part) if isinstance(part, nn.ModuleDict) else {}  # of lists
        found |= {f"{name}.{index}": block for index, block in inner.items()}
    return found


def with_attribute(owner: Any, attribute: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Bind an attribute's present value: the returned function restores it while it runs."""
    value = getattr(owner, attribute)

    def later(*args: Any) -> Any:
        present = getattr(owner, attribute)
        setattr(owner, attribute, value)
        try:
            return run(*args)
        finally:
            setattr(owner, attribute, present)

    return later


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


class LastBlock:
    """A replacement for the last block's forward that computes only the target's tokens.

    Pipelines discard its outputs for text and control tokens, which are needed only as keys and values.

    Args:
        block: with its own forward.
        compute: the forward for the target; called with the block, the tokens of target, controls and text, and the
            block's other arguments. If the block joins text and image tokens in one sequence, so does its result.
        unread: the block's layers that `compute` does not use.
    """

    def __init__(self, block: nn.Module, compute: Callable[..., Any], unread: tuple[str, ...] = ()) -> None:
        self.full = block.forward
        self.block = block
        self.compute = compute
        self.unread = unread
        self.target_tokens: slice | None = None

    def __call__(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        at = self.target_tokens
        if at is None:
            return self.full(hidden_states, encoder_hidden_states, *args, **kwargs)
        before, target, control = hidden_states.tensor_split((at.start, at.stop), dim=1)
        text = before if encoder_hidden_states is None else encoder_hidden_states
        return self.compute(self.block, target, control, text, *args, **kwargs)


def trim_last_block(transformer: nn.Module, *arguments: Any) -> None:
    """Replace the forward of the last block; `arguments` of `LastBlock` after the block."""
    *_, block = blocks(transformer).values()
    block.forward = LastBlock(block, *arguments)


@contextmanager
def target_tokens_only(block: nn.Module, tokens: int, text_tokens: int = 0) -> Iterator[None]:
    """Temporarily make a `LastBlock` compute only the first `tokens` image tokens; other blocks compute all.

    Args:
        text_tokens: number of text tokens before these in the block's `hidden_states`.
    """
    last = block.forward
    if not isinstance(last, LastBlock):
        yield
        return
    last.target_tokens = slice(text_tokens, text_tokens + tokens)
    try:
        yield
    finally:
        last.target_tokens = None


def ignored_by_ddp(module: nn.Module) -> list[str]:
    """Return the parameters that DDP must ignore: frozen ones, and those that a `LastBlock` does not use.

    Frozen ones are equal in all processes, and gloo cannot send float8. Unused ones may train but get no gradient, for
    which DDP would wait.
    """
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return frozen + [
        f"{at}.{name}"
        for at, block in module.named_modules()
        if isinstance(last := block.forward, LastBlock)
        for name, _ in block.named_parameters()
        if name.startswith(tuple(f"{layer}." for layer in last.unread))
    ]


def check_attention_backend(name: str | None, trains: bool = False) -> None:
    """Raise a UserError for an attention backend that diffusers does not know, or that cannot train."""
    if name is None:
        return
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise UserError(f"model.attention_backend={name}: diffusers has {', '.join(known)}")
    if trains and name.startswith(INFERENCE_ONLY):
        raise UserError(f"model.attention_backend={name} has no right backward pass: use it in prediction only")


def set_attention_backend(transformer: Any, name: str | None) -> None:
    """Set an attention kernel of diffusers, None for PyTorch's without cuDNN; raise a UserError if it fails."""
    # PyTorch from 2.11 on prefers cuDNN on an H100 or H200, whose gradients are wrong where the output is a part of a
    # larger tensor, as in FLUX's single blocks (benchmarks/README.md), or NaN (PyTorch's issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if name is None:
        return
    from diffusers.models.attention_dispatch import attention_backend

    try:
        with attention_backend(name):  # diffusers would also change the default of all other models
            transformer.set_attention_backend(name)
    except (ImportError, RuntimeError, ValueError) as error:
        raise UserError(f"model.attention_backend={name} cannot be used here: {reason(error)}") from error


def compile_blocks(transformer: Any, dynamic: bool | None) -> None:
    """Compile the blocks, one graph for all that are alike.

    Their forwards are compiled, not their calls: hooks, which stream or gather blocks, stay outside.

    Args:
        dynamic: whether one graph serves all sizes; None compiles one for the first size and another for a second.
    """
    found = blocks(transformer)
    # Several lists may have one class (Z-Image has three): their graphs differ but count as one function's.
    lists = len({name.rpartition(".")[0] for name in found})
    compiled = partial(torch.compile, fullgraph=True, dynamic=dynamic, recompile_limit=lists * GRAPHS)
    for block in found.values():
        forward = block.forward
        if isinstance(forward, LastBlock):
            forward.full, forward.compute = compiled(forward.full), compiled(forward.compute)
        else:
            block.forward = compiled(forward)
