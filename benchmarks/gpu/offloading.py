"""Weights and activations that wait in the host's memory: the same bits as without, and less of the device's."""

import gc

import torch

from benchmarks.gpu.bench import NEEDS_CUDA, Bench, Facts, deterministic, differing, gradients
from benchmarks.memory import loss
from lightning_modules.execution.offload import ActivationOffload, HostMemory

BLOCKS = 4


def blocks(bench: Bench, facts: Facts) -> list[str]:
    """model.offload.blocks: its pieces are on the host and pinned, memory falls, gradients and outputs are the same."""
    wrong = []
    for precision in ("bf16", "fp8", "nf4"):
        found: Facts = {}
        facts[precision] = found
        plain = bench.module(precision, "model.gradient_checkpointing=full", depth=4)
        batch = bench.batch(plain, 512)
        with deterministic():
            expected = gradients(plain, batch)
            again = differing(expected, gradients(plain, batch))
            with torch.no_grad():
                output = loss(plain, batch)
        if again:
            wrong.append(f"{precision}: two plain steps differ in {len(again)} tensors")
        whole = bench.allocated()
        del plain
        bench.free()
        count = bench.size(BLOCKS, 2)
        settings = f"model.offload.blocks={count}", "model.gradient_checkpointing=full"
        streamed = bench.module(precision, *settings, depth=4)
        pieces = [one.piece for one in gc.get_objects() if type(one) is HostMemory]
        places = sorted({str(piece.device) for piece in pieces})
        with deterministic():
            steps = [differing(expected, gradients(streamed, batch)) for _ in range(2)]
            with torch.no_grad():
                same_output = torch.equal(output, loss(streamed, batch))
        different = sorted({*steps[0], *steps[1]})
        left = bench.allocated()
        waiting = sum(map(len, pieces)) - 2 * max(map(len, pieces))
        found |= {"pieces": len(pieces), "on": places, "bytes_waiting": waiting, "tensors_that_differ": len(different)}
        found["pinned"] = all(piece.is_pinned() for piece in pieces) if bench.cuda else NEEDS_CUDA
        found |= {"gb_before": bench.gigabytes(whole), "gb_after": bench.gigabytes(left)}
        if places != ["cpu"] or len(pieces) != count:
            wrong.append(f"{precision}: {len(pieces)} pieces on {places}, {count} on the CPU were expected")
        if different:
            wrong.append(f"{precision}: {len(different)} of {len(expected)} tensors differ, as {different[0]}")
        if not same_output:
            wrong.append(f"{precision}: a forward pass without gradients differs")
        if bench.cuda and not found["pinned"]:
            wrong.append(f"{precision}: its pieces are not pinned")
        if bench.cuda and whole - left < 0.9 * waiting:
            wrong.append(f"{precision}: memory falls by {whole - left} bytes, {waiting} wait in the host's memory")
        del streamed, pieces, expected, batch
        bench.free()
    return wrong


def activations(bench: Bench, facts: Facts) -> list[str]:
    """model.offload.activations: the same gradients, a lower peak, and nothing left behind the backward pass."""
    wrong = []
    plain = bench.module("bf16")
    offloaded = bench.module("bf16", "model.offload.activations=true")
    offload, batch = offloaded.execution.saved_tensors(), bench.batch(plain, 1024)
    assert isinstance(offload, ActivationOffload)
    offload.least = bench.size(offload.least, 0)
    for policy in ("full", "none"):
        most, seconds = [], []
        for module in (plain, offloaded):
            module.execution.set_checkpointing(module.transformer, policy)
        with deterministic():
            expected = gradients(plain, batch)
            different = differing(expected, gradients(offloaded, batch))
        del expected
        before = bench.allocated()
        for module in (plain, offloaded):
            bench.peak_memory()
            gradients(module, batch)
            most.append(bench.peak_memory() - before)
            seconds.append(bench.seconds(lambda module=module: gradients(module, batch)))
        left = bench.allocated() - before
        facts[policy] = {
            "tensors_that_differ": len(different),
            "bytes_left": left if bench.cuda else NEEDS_CUDA,
            "gb_plain": bench.gigabytes(most[0]),
            "gb_offloaded": bench.gigabytes(most[1]),
            "seconds_plain": round(seconds[0], 4),
            "seconds_offloaded": round(seconds[1], 4),
        }
        if different:
            wrong.append(f"{policy}: {len(different)} tensors differ, as {different[0]}")
        if left > 2**20:
            wrong.append(f"{policy}: {left} bytes are left behind the backward pass")
        if bench.cuda and not bench.tiny and policy == "none" and most[1] > 0.9 * most[0]:
            wrong.append(f"{policy}: the peak is {most[1]} bytes in place of {most[0]}")
    return wrong
