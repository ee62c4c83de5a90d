"""The speed table: steps of whole models, each with its memory beside what task=dry_run estimates."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Facts
from benchmarks.gpu.parts import Row
from datamodules.batch import LatentBatch

ROUNDS = 3


def measured(bench: Bench, facts: Facts, row: Row) -> list[str]:
    """Measure a row of the table; running out of memory is a result."""
    from benchmarks.full_size import measure
    from lightning_modules.estimation.memory import bytes_per_parameter
    from tasks.dry_run import weight_bytes

    facts |= row._asdict()
    try:
        module = _module(bench, row)
        side = bench.size(row.side, 64)
        trained = [p for p in module.transformer.parameters() if p.requires_grad]
        state = round(sum(p.numel() for p in trained) * bytes_per_parameter(module.optimization.optimizer))
        peak = _estimates(bench, row.model, row.adapter, row.compiled, side)
        policy = row.checkpointing
        if policy == "auto":
            policy = _raised(bench, module, bench.batch(module, side), peak)
        adapter = sum(tensor.nbytes for tensor in module.adapter.tensors(module.transformer).values())
        estimated = weight_bytes(module.base.source) + adapter + state + peak(policy)
        facts |= measure(module, bench.batch(module, side), policy, bench.size(ROUNDS, 1), bench.peak)
    except torch.OutOfMemoryError:
        facts["out_of_memory"] = True
        return []
    facts["estimated_gb"] = round(estimated / 1e9, 2)
    if facts["peak_memory_gb"] is not None:
        facts["share_of_estimate"] = round(facts["peak_memory_gb"] * 1e9 / estimated, 3)
    return []


def _module(bench: Bench, row: Row) -> Any:
    """Return the full model, reused from the previous row if equal, and compiled if requested."""
    from lightning_modules.execution.blocks import compile_blocks

    what, module = bench.kept
    if what != row.base or (module.execution.compile_blocks and not row.compiled):
        module, bench.kept = None, (None, None)
        bench.free()
        module = bench.module(row.precision, f"adapter={row.adapter}", model=row.model, depth=None)
        bench.kept = row.base, module
    if row.compiled and not module.execution.compile_blocks:
        with bench.compiler():
            compile_blocks(module.transformer, dynamic=False)
        module.execution.compile_blocks = True
    return module


def _raised(bench: Bench, module: Any, batch: LatentBatch, estimate: Callable[[str], int]) -> str:
    """Return the checkpointing policy that a run chooses after its first step."""
    from benchmarks.memory import loss
    from lightning_modules.estimation.memory import DeviceMemory, choose_policy
    from lightning_modules.execution.checkpointing import AUTO

    if not bench.cuda:
        return "full"
    memory, needs = DeviceMemory(bench.device), {policy: estimate(policy) for policy in AUTO}
    module.execution.set_checkpointing(module.transformer, "full")
    memory.restart()
    loss(module, batch).backward()
    excess = memory.taken() / needs["full"]
    module.transformer.zero_grad(set_to_none=True)
    return choose_policy(needs, excess, memory.free())


@cache
def _estimates(bench: Bench, model: str, adapter: str, compiled: bool, side: int) -> Any:
    """Return the memory of a step without weights, by policy; it is the same for all weight formats."""
    from benchmarks.memory import fake_step

    module = bench.described(model, f"adapter={adapter}", f"model.compile={compiled}")
    return cache(fake_step(module, side, 1).peak)
