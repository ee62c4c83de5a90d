"""A run that hangs ends, and says where it hung."""

import faulthandler
import os
import sys
import threading
from typing import Any

import lightning.pytorch as L

from lightning_modules.edit_module import EditModule
from lightning_modules.timing import LOADING


class Watchdog(L.Callback):
    """Prints the stacks of all threads and ends the process, and with it the run, where nothing is done for long.

    A step, a picture, and a sample that is encoded or of which the loss is measured are something. Time in which a
    component is loaded does not count, since a download takes as long as it takes; nor does time in which the process
    was stopped.

    Args:
        minutes: without anything done; None waits for ever.
    """

    def __init__(self, minutes: float | None) -> None:
        self.minutes = minutes
        self._steps = 0
        self._ended = threading.Event()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, EditModule)
        if self.minutes is not None:
            self._ended.clear()
            seconds = 60 * self.minutes
            watch = threading.Thread(target=self._watch, args=(pl_module, seconds), daemon=True, name="watchdog")
            watch.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._steps += 1

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._ended.set()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._ended.set()

    def _watch(self, module: EditModule, seconds: float) -> None:
        """A thread of its own."""
        tick, idle, before = min(10.0, seconds / 10), 0.0, None
        while not self._ended.wait(tick):
            timer = module.base.timer
            done = self._steps, timer.done
            idle = idle + tick if done == before and LOADING not in timer.running else 0.0
            before = done
            if idle >= seconds:
                self._end()

    def _end(self) -> None:
        sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        what = f"error: nothing was done for {self.minutes:g} minutes (watchdog_minutes): where it waits is above"
        os.write(2, f"{what}; start again; a run resumes from its last checkpoint by ckpt_path=last\n".encode())
        os._exit(1)
