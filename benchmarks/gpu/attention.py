"""Attention: its dtypes, its kernels, and their gradients next to float32's and each other's."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import profile

from benchmarks.gpu.bench import NEEDS_CUDA, Bench, Facts, distance, gradients

ATTENTION = re.compile("flash|fmha|attention|sdpa", re.IGNORECASE)
# How far gradients of attention in bf16 may be from float32's, as a share of their size; FlashAttention's and cuDNN's
# were 0.004 on an H100, wrong ones 1.4.
OF_GRADIENTS = 0.02
# How much farther from float32's gradients those of a model may be with our attention than with FlashAttention.
OF_FLASH = 1.5
# Blocks of each kind whose gradients are compared.
DEPTH = 4
# Values of model.attention_backend; null is the kernel that Retouch chooses.
BACKENDS = {"ours": "null", "flash": "_native_flash", "memory-efficient": "_native_efficient"}

# (B, S, H, D) three times -> (B, S, H, D).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def kernels(bench: Bench, facts: Facts) -> list[str]:
    """Check the dtypes of queries, keys and values in attention, and its gradients; note its kernels."""
    module = bench.module("bf16", "model.gradient_checkpointing=none", depth=1)
    batch = bench.batch(module, 1024)
    with _Attended() as attended:
        gradients(module, batch)
    facts["dtypes"] = sorted(attended.dtypes)
    with profile() as profiler:
        gradients(module, batch)
    found = {event.key: event.count for event in profiler.key_averages() if ATTENTION.search(event.key)}
    facts["runs"] = {name[:80]: count for name, count in found.items()}
    facts["gradients_away"] = away = _away(bench, _ours)
    wrong = []
    if attended.dtypes != {"bfloat16 bfloat16 bfloat16"}:
        wrong.append(f"attention gets {', '.join(sorted(attended.dtypes))}")
    return wrong + [
        f"{order}: attention's gradients are {max(distances)} of their size from float32's"
        for order, distances in away.items()
        if not max(distances) < OF_GRADIENTS
    ]


def plain(bench: Bench, facts: Facts) -> list[str]:
    """Note the gradients of PyTorch's own call of cuDNN, whose faults, if it has any, are PyTorch's."""
    if not bench.cuda:
        facts["cudnn"] = NEEDS_CUDA
        return []

    def attend(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _torch(*inputs)

    facts["cudnn"] = f"{torch.backends.cudnn.version()}, torch {torch.__version__}"
    facts["gradients_away"] = _away(bench, attend)
    return []


def gradients_by_kernel(bench: Bench, facts: Facts) -> list[str]:
    """Compare gradients of a few blocks by kernel: with float32's, and with each other's."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, backend in {"float32": "null", **BACKENDS}.items():
        if name == "memory-efficient" and not bench.cuda:
            continue
        settings = "model.gradient_checkpointing=none", f"model.attention_backend={backend}"
        module = bench.module("float32" if name == "float32" else "bf16", *settings, depth=DEPTH)
        found[name] = {key: one.cpu() for key, one in gradients(module, bench.batch(module, 1024)).items()}
        del module
        bench.free()
    exact = found.pop("float32")
    away = {name: round(distance(one, exact), 4) for name, one in found.items()}
    facts["from_float32"] = away
    facts["from_flash"] = {name: round(distance(one, found["flash"]), 4) for name, one in found.items()}
    if not away["ours"] < OF_FLASH * away["flash"]:
        return [f"gradients are {away['ours']} from float32's, with FlashAttention {away['flash']}"]
    return []


def _ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend as training steps do: once a module has been built, diffusers calls what Retouch has chosen."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    return dispatch_attention_fn(query, key, value)


def _torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend as diffusers calls PyTorch."""
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _away(bench: Bench, attend: Attend) -> dict[str, list[float]]:
    """Return how far gradients are from float32's, of calls in two orders.

    PyTorch 2.11 to 2.13 keep cuDNN's backward graph of the first call for all calls with such queries, keys and values,
    whatever the layout of the gradient (pull request 191576). FLUX's double blocks send a dense one, its single blocks
    a slice of a wider one.
    """
    first, second = (48, 80) if bench.tiny else (1280, 1344)  # each order has graphs of its own
    orders = {"dense, then slice": (first, [False, True]), "slice, then dense": (second, [True, False])}
    heads, width = (2, 16) if bench.tiny else (24, 128)
    away: dict[str, list[float]] = {}
    for name, (tokens, kinds) in orders.items():
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(3, 1, tokens, heads, width, generator=generator).to(bench.device)
        above = torch.randn(1, tokens, 2 * heads * width, generator=generator).to(bench.device)
        exact = [_gradient(_exact, inputs, above, is_slice) for is_slice in kinds]
        away[name] = [
            round(distance(_gradient(attend, inputs.bfloat16(), above, is_slice), wanted), 4)
            for _ in range(2)  # the second time all is warm
            for is_slice, wanted in zip(kinds, exact, strict=True)
        ]
    return away


def _gradient(attend: Attend, inputs: Tensor, above: Tensor, is_slice: bool) -> dict[str, Tensor]:
    """Return the gradient of (3, B, S, H, D), where attention's output is all that it is of, or a slice."""
    x = inputs.clone().requires_grad_()
    part = attend(*x).flatten(2)
    whole = torch.cat([part, torch.zeros_like(part)], dim=-1) if is_slice else part
    whole.backward(above[..., : whole.shape[-1]].to(whole).contiguous())
    assert x.grad is not None
    return {"x": x.grad.float()}


def _exact(*inputs: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _torch(*inputs)


class _Attended(TorchFunctionMode):
    """A mode that notes the dtypes of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention or "attention" in getattr(function, "__name__", ""):
            given = [one for one in [*args, *(kwargs or {}).values()] if isinstance(one, Tensor)][:3]
            self.dtypes.add(" ".join(str(one.dtype).removeprefix("torch.") for one in given))
        return function(*args, **(kwargs or {}))
