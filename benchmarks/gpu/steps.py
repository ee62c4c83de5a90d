"""Training steps of each base and adapter: their losses, where they wait, their memory."""

import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import NEEDS_CUDA, Bench, Facts, distance, gradients
from benchmarks.memory import compare

BASES = ("bf16", "fp8", "nf4", "fp4", "int8_w8a8")
# How far losses and gradients may be from the CPU's, as a share: tensor cores round inputs and gradients to fp8, too.
OF_LOSSES, OF_GRADIENTS = {"fp8": 0.05}, 0.5
# What the estimate may be of the memory that is measured; beyond it `auto` does not fit, or wastes much.
ESTIMATE = (0.9, 1.3)


def ortho_tlora(bench: Bench, facts: Facts) -> list[str]:
    """Take two steps with adapter=ortho_tlora."""
    losses = _two_steps(bench, bench.module("bf16", "adapter=ortho_tlora", "adapter.rank=8", narrow=True))
    facts["losses"] = losses
    return [] if _finite(losses) else [f"losses {losses}"]


def bases(bench: Bench, facts: Facts) -> list[str]:
    """Take two training steps on each base: losses equal the CPU's, and the second never waits for the GPU."""
    wrong = []
    for base in BASES:
        module = bench.module(base, narrow=True)
        found = gradients(module, bench.batch(module, 64))
        losses, waits = _two_steps(bench, module), _waits(bench, module)
        facts[base] = {"losses": losses, "waits": waits}
        if not _finite(losses):
            wrong.append(f"{base}: losses {losses}")
        if bench.cuda:
            there = bench.module(base, narrow=True, device=torch.device("cpu"))
            away = distance(found, gradients(there, bench.batch(there, 64)))
            expected = _two_steps(bench, there)
            facts[base] |= {"losses_of_the_cpu": expected, "gradients_away": round(away, 4)}
            if any(
                abs(mine - its) > OF_LOSSES.get(base, 0.01) * its for mine, its in zip(losses, expected, strict=True)
            ):
                wrong.append(f"{base}: losses {losses}, on the CPU {expected}")
            if not away < OF_GRADIENTS:
                wrong.append(f"{base}: gradients are {away:.2f} of their size from the CPU's")
            if waits:
                wrong.append(f"{base}: a step waits for the device in {', '.join(waits)}")
    return wrong


def estimate(bench: Bench, facts: Facts) -> list[str]:
    """Compare estimated and measured peak memory of a step, by policy, on a few blocks of real widths."""
    wrong = []
    low, high = ESTIMATE
    for model in ("flux_kontext", "qwen_image_edit"):
        module = bench.module("bf16", model=model)
        for policy, estimated, measured in compare(module, bench.size(1024, 64), 1, bench.device):
            share = estimated / measured
            facts[f"{model} {policy}"] = {
                "estimated_gb": round(estimated / 1e9, 4),
                "measured_gb": round(measured / 1e9, 4),
                "share": round(share, 3),
            }
            if bench.cuda and not bench.tiny and not low < share < high:
                wrong.append(f"{model} {policy}: estimated {estimated} bytes, measured {measured}")
        del module
        bench.free()
    return wrong


def _two_steps(bench: Bench, module: Any) -> list[float]:
    """Return the losses of two steps."""
    optimizer = module.configure_optimizers()["optimizer"]
    return [float(_step(module, optimizer, bench.batch(module, 64), number)) for number in range(2)]


def _step(module: Any, optimizer: Any, batch: Any, number: int) -> Tensor:
    """Take a step as Lightning does."""
    with torch.autocast(module.device.type, torch.bfloat16):
        value = module.training_step(batch, number)["loss"]
    value.backward()
    module.optimization.before_step(optimizer, number, 1.0, None)
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def _waits(bench: Bench, module: Any) -> dict[str, int] | str:
    """Return where a step waits for the GPU, and how often."""
    if not bench.cuda:
        return NEEDS_CUDA
    optimizer, batch = module.configure_optimizers()["optimizer"], bench.batch(module, 64)
    _step(module, optimizer, batch, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _step(module, optimizer, batch, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found: dict[str, int] = {}
    for one in caught:
        if "synchronizing" in str(one.message):
            place = f"{one.filename}:{one.lineno}"
            found[place] = found.get(place, 0) + 1
    return found


def _finite(losses: list[float]) -> bool:
    return all(0 < one < 1e3 for one in losses)
