"""Attention as diffusers' models compute it: PyTorch's kernels, the layout of gradients, and what is kept of it."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from foundation.errors import UserError
from foundation.files import reason

# Attention kernels without a backward pass.
INFERENCE_ONLY = ("sage", "_sage")
# PyTorch's flash attention by other libraries, and how to get them.
LIBRARIES = {
    "FA3": "build flash_attn_interface from the folder hopper of github.com/Dao-AILab/flash-attention",
    "FA4": "pip install --pre flash-attn-4",
}
# The order of PyTorch's kernels for unmasked attention on cards where cuDNN's is the fastest: twice as fast as
# FlashAttention-2 on an H100, slower on other cards (docs/speed.md). With masks it can be NaN (PyTorch's issue 196678).
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_CAPABILITIES = ((9, 0), (10, 0))
# Tokens from which it is faster in eager steps, which wait for Python: a call takes the CPU longer. On an H100 it was
# faster with 8,704 tokens, and mostly slower with 4,600 and less.
CUDNN_EAGER = 8192

# Makes the context of each attention in a checkpointed block: it keeps the output, or returns it instead of computing.
_kept: Callable[[], AbstractContextManager[Any]] | None = None


class DenseGradient(torch.autograd.Function):
    """An identity whose gradient is contiguous.

    PyTorch up to 2.13 caches cuDNN's backward graphs without the layout of the incoming gradient, and applies the graph
    of one layout to another (PyTorch's pull request 191576). FLUX's double blocks send a contiguous gradient, its
    single blocks a slice of a wider tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def check_attention_backend(name: str | None, trains: bool = False) -> None:
    """Raise a UserError for an attention backend that is unknown or cannot train."""
    if name is None or name in LIBRARIES:
        return
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = [*LIBRARIES, *(backend.value for backend in AttentionBackendName)]
    if name not in known:
        raise UserError(f"model.attention_backend={name}: choose one of {', '.join(known)}")
    if trains and name.startswith(INFERENCE_ONLY):
        raise UserError(f"model.attention_backend={name} has no backward pass: use it in prediction only")


def set_attention_backend(transformer: Any, name: str | None, device: torch.device) -> None:
    """Set the attention kernel of a diffusers model; raise a UserError if it cannot be used.

    Args:
        name: a backend of diffusers, or a key of `LIBRARIES`; None for PyTorch's fastest on the device.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    torch.backends.cuda.enable_cudnn_sdp(False)  # elsewhere, as in text encoders with masks
    try:
        if name in LIBRARIES:
            activate_flash_attention_impl(name)
        elif name is not None:
            with attention_backend(name):  # diffusers would also change the default of all other models
                transformer.set_attention_backend(name)
    except ImportError as error:
        how = f". To install it: {LIBRARIES[name]}" if name in LIBRARIES else ""
        raise UserError(f"model.attention_backend={name}: {reason(error)}{how}") from error
    except (RuntimeError, ValueError) as error:
        raise UserError(f"model.attention_backend={name} cannot be used here: {reason(error)}") from error
    has_fast_cudnn = device.type == "cuda" and torch.cuda.get_device_capability(device) in CUDNN_CAPABILITIES
    backend = AttentionBackendName.NATIVE if name is None or name in LIBRARIES else AttentionBackendName(name)
    _register(backend, CUDNN_FIRST if name is None and has_fast_cudnn else None)


@cache
def _own(backend: Any) -> Callable[..., Tensor]:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _AttentionBackendRegistry._backends[backend]


def _register(backend: Any, unmasked: list[SDPBackend] | None) -> None:
    """Replace a backend of diffusers by one with a dense gradient, whose output can be kept.

    Args:
        unmasked: PyTorch's kernels for attention without a mask, in this order; None for PyTorch's order.
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    own = _own(backend)

    @wraps(own)
    def attend(**arguments: Any) -> Tensor:
        ordered: AbstractContextManager[Any] = nullcontext()
        long = torch.compiler.is_compiling() or arguments["query"].shape[1] >= CUDNN_EAGER
        if unmasked is not None and long and arguments.get("attn_mask") is None:
            ordered = sdpa_kernel(unmasked, set_priority=True)
        with nullcontext() if _kept is None else _kept(), ordered:
            return DenseGradient.apply(own(**arguments))

    _AttentionBackendRegistry._backends[backend] = attend


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = any(word in operator.name() for word in ("attention", "flash_attn"))
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


# Contexts of `torch.utils.checkpoint.checkpoint` for a block that keeps attention's output and log-sum-exp: those of
# compiled blocks see each operator once, when the graph is built.
keep_attention_compiled = partial(create_selective_checkpoint_contexts, _keep_attention)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the same contexts for eager blocks: they see only attention, since each operator costs Python time."""
    kept: deque[AbstractContextManager[Any]] = deque()

    def keep() -> AbstractContextManager[Any]:
        keeping, returning = keep_attention_compiled()
        keeping.respect_saved_tensors_hooks = True  # model.offload.activations relies on it
        kept.append(returning)
        return keeping

    return _around_attention(keep), _around_attention(kept.popleft)


@contextmanager
def _around_attention(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    global _kept
    before, _kept = _kept, context
    try:
        yield
    finally:
        _kept = before
