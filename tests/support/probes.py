"""Callbacks that look into a run, or harm it."""

import ctypes
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as L
import torch
from torchmetrics import Metric

from callbacks import find_callback, lifecycle
from foundation.errors import UserError
from foundation.notes import note_once


class CountBatches(L.Callback):
    """Writes STEP:BATCHES for each optimizer step: how many batches it accumulated."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.batches += 1
        if not trainer.fit_loop._should_accumulate():
            with self.file.open("a") as file:
                print(f"{trainer.global_step}:{self.batches}", file=file)
            self.batches = 0


class Note(L.Callback):
    """Logs notes: one in every process, and one of its own."""

    def on_train_start(self, trainer, pl_module):
        note_once("of every process")
        note_once(f"of process {trainer.global_rank}")


class Vandal(L.Callback):
    """Damages images after they were checked and before they are read."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_fit_start(self, trainer, pl_module):
        for image in self.path.iterdir():
            image.write_bytes(image.read_bytes()[:200])


class Fail(L.Callback):
    """Makes one process fail in its second step, by a mistake or kill; the others step, or hang outside of Python."""

    def __init__(self, rank: int, how: str, others: str = "step") -> None:
        self.rank = rank
        self.how = how
        self.others = others

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != 1:
            return
        if trainer.global_rank != self.rank:
            if self.others == "hang":
                ctypes.CDLL(None).system(b"exec sleep 100 > /dev/null 2>&1")
            return
        time.sleep(1)  # the others are where they wait
        (Path(trainer.default_root_dir) / "failed").touch()
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UserError("pair 7 is damaged: delete it")


class HangAtTheEnd(L.Callback):
    """Lets a process wait in a library when it ends, as for a GPU that waits in NCCL."""

    def __init__(self) -> None:
        lifecycle.SECONDS_TO_END = 3

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.teardown = lambda: ctypes.CDLL(None).system(b"exec sleep 100 > /dev/null 2>&1")


class InOrder(Metric):
    """A metric that is no mean over images: it depends on their order, too."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[])

    def update(self, one, other):
        self.seen.append((one - other).abs().mean())

    def compute(self):
        return torch.stack([number * value for number, value in enumerate(self.seen, 1)]).std(correction=0)


class StopWhileSampling(L.Callback):
    """The second process gets SIGTERM in the middle of its sample images of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer, pl_module):
        sample = pl_module.sampler.sample

        def told(*args):
            if trainer.global_rank == 1 and trainer.global_step == self.step:
                os.kill(os.getpid(), signal.SIGTERM)
            return sample(*args)

        pl_module.sampler.sample = told


class StopAt(L.Callback):
    """Raises signals, given by name, in the middle of a step."""

    def __init__(self, step: int, signals: Sequence[str]) -> None:
        self.step = step
        self.signals = signals

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            for name in self.signals:
                signal.raise_signal(signal.Signals[name])


class CountShares(L.Callback):
    """Writes down how many sample images and validation losses each process made: rank0, rank1."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.made = {"pictures": 0, "losses": 0}

    def on_fit_start(self, trainer, pl_module):
        sample, noised_by = pl_module.sampler.sample, pl_module.flow.noised_by

        def counted_sample(*args):
            self.made["pictures"] += 1
            return sample(*args)

        def counted_losses(*args):  # noised without gradient: validated
            self.made["losses"] += not torch.is_grad_enabled()
            return noised_by(*args)

        pl_module.sampler.sample, pl_module.flow.noised_by = counted_sample, counted_losses

    def on_train_end(self, trainer, pl_module):
        (self.folder / f"rank{trainer.global_rank}").write_text(json.dumps(self.made))


class Ask(L.Callback):
    """Makes the requests of a step, by name, before it; `signal` raises SIGUSR1."""

    def __init__(self, steps: Mapping[int, Sequence[str]]) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        stopper = find_callback(trainer, lifecycle.GracefulStop)
        stopper._next_look = 0.0
        for name in self.steps.get(trainer.global_step + 1, ()) if trainer.is_global_zero else ():
            if name == "signal":
                signal.raise_signal(signal.SIGUSR1)
            else:
                stopper.run.ask(name)
