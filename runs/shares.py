"""Samples divided among the processes of a run: process r of N takes r, r + N, r + 2N, ... of them."""

import functools
from typing import Any, TypeVar

import lightning.pytorch as L
import torch
from torch import distributed

from runs.signals import stop

Made = TypeVar("Made")


@functools.cache
def cpu_group() -> Any:
    """Create the processes' group for the CPU, on first use: its exchanges do not wait for the GPUs."""
    return distributed.new_group(backend="gloo")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error comes from the end of another process; gloo raises a RuntimeError without a class."""
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def divides(trainer: L.Trainer) -> bool:
    """Return whether each process computes alone; those of a sharded base compute all samples together."""
    return trainer.world_size > 1 and trainer.lightning_module.device_mesh is None


def share(trainer: L.Trainer, count: int) -> slice:
    """Return this process's share of `count` samples."""
    return slice(trainer.global_rank, count, trainer.world_size) if divides(trainer) else slice(0, count, 1)


def of_first(trainer: L.Trainer, mine: Made) -> Made:
    """Return the first process's value in every process; waits for it."""
    if trainer.world_size == 1:
        return mine
    held = [mine]
    distributed.broadcast_object_list(held, src=0, group=cpu_group())
    return held[0]


def of_any(trainer: L.Trainer, mine: int) -> int:
    """Return the largest of the processes' numbers in every process; waits for all processes, but for no device."""
    number = torch.tensor(mine)
    if trainer.world_size > 1:
        distributed.all_reduce(number, distributed.ReduceOp.MAX, cpu_group())
    return int(number)


def is_stopped(trainer: L.Trainer, together: bool = False) -> bool:
    """Return whether a signal ends long work between two steps; `together`, all processes are at the same place."""
    mine = int(stop.signal or 0)
    return bool(of_any(trainer, mine) if together or not divides(trainer) else mine)


def of_all(trainer: L.Trainer, mine: list[Made]) -> list[Made]:
    """Return the results for all samples, in their order, in every process; waits for all processes.

    Args:
        mine: the results for this process's share; their tensors are on the CPU.
    """
    if not divides(trainer):
        return mine
    made: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(made, mine, cpu_group())
    return [made[index % len(made)][index // len(made)] for index in range(sum(map(len, made)))]
