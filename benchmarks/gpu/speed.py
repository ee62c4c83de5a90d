"""The speed table: steps of whole models, and next to them what task=dry_run estimates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.bench import NOTHING_KEPT, Bench, Facts
from benchmarks.gpu.parts import Row

ROUNDS = 3
# The peer's attention: PyTorch's choice before it preferred cuDNN, whose gradients were wrong.
PEERS_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def measured(bench: Bench, facts: Facts, row: Row) -> list[str]:
    """Measure a row of the table; running out of memory is a result."""
    from benchmarks.full_size import execute, measure, training_step

    facts |= row._asdict()
    try:
        module = _module(bench, row)
        batch = bench.batch(module, row.side)
        if row.how == "peer":
            module.transformer.enable_gradient_checkpointing()
        else:
            with bench.compiler():
                execute(module, row.checkpointing, row.how == "compiled")
        with _as_the_peer() if row.how == "peer" else nullcontext():
            facts |= measure(training_step(module, batch), bench.device, bench.size(ROUNDS, 1))
    except torch.OutOfMemoryError:
        facts["out_of_memory"] = True
        return []
    facts |= {"tokens": module.geometry.token_count(batch), "matrix_peak_tflops": bench.peak / 1e12}
    return []


def _module(bench: Bench, row: Row) -> Any:
    """Return the full model, reused from the previous row if equal."""
    base, module = bench.kept
    if base != row.base:
        module, bench.kept = None, NOTHING_KEPT
        bench.free()
        adapter, peer = f"adapter={row.adapter}", row.how == "peer"
        module = bench.module(row.precision, adapter, model=row.model, depth=None, peer=peer)
        bench.kept = row.base, module
    return module


@contextmanager
def _as_the_peer() -> Iterator[None]:
    """Temporarily attend with diffusers' own function, which Retouch replaces, and with FlashAttention."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backends = _AttentionBackendRegistry._backends
    native = backends[AttentionBackendName.NATIVE]
    own = {AttentionBackendName.NATIVE: getattr(native, "__wrapped__", native)}
    with mock.patch.dict(backends, own), sdpa_kernel(PEERS_ATTENTION):
        yield


class Simulated(NamedTuple):
    """A step without weights.

    Attributes:
        flops: FLOPs of its useful work.
        trained: bytes of the adapter and of the optimizer's state.
        peak: the most bytes besides, by checkpointing policy.
    """

    flops: int
    trained: int
    peak: Callable[[str], int]


def planned(bench: Bench, row: Row) -> Facts:
    """Compute a row's useful work and the memory that task=dry_run estimates, which needs no GPU."""
    from benchmarks.full_size import PRECISIONS
    from tasks.dry_run import weight_bytes

    step = _simulated(bench, row.model, row.adapter, bench.size(row.side, 64))
    facts: Facts = {"useful_tflop": step.flops / 1e12}
    if row.how != "peer":
        weights = weight_bytes(bench.described(row.model, *PRECISIONS[row.precision]).base.source)
        facts["estimated_gb"] = round((weights + step.trained + step.peak(row.checkpointing)) / 1e9, 2)
    return facts


@cache
def _simulated(bench: Bench, model: str, adapter: str, side: int) -> Simulated:
    """Return a step of a model in bf16: all weight formats take the same memory besides their weights."""
    from benchmarks.full_size import useful_flops
    from benchmarks.memory import empty_batch, fake_step
    from lightning_modules.adapters.adapter import trainable
    from lightning_modules.estimation.memory import bytes_per_parameter

    module = bench.described(model, f"adapter={adapter}")
    meta = module.execution.adapted_meta_transformer()
    state = bytes_per_parameter(module.optimization.optimizer)
    trained = sum(tensor.nbytes for tensor in module.adapter.tensors(meta).values())
    trained += round(state * sum(parameter.numel() for parameter in trainable(meta).values()))
    flops = useful_flops(module, empty_batch(module, side, 1))
    return Simulated(flops, trained, cache(fake_step(module, side, 1).peak))
