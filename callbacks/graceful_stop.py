"""Training and prediction finish the batch that they are in, and then stop, when a signal tells them to."""

import faulthandler
import signal
from typing import Any

import lightning.pytorch as L
import torch
from torch import distributed

from callbacks.shares import cpu_group, is_lost_peer
from callbacks.signals import stop

# Seconds for what a process does after another one has ended: a call that waits for that in NCCL does not return.
SECONDS_TO_END = 100.0


class GracefulStop(L.Callback):
    """A signal ends training after the current step, and prediction after the current picture or sample.

    Training ends as it does at its last step, so that it is saved; prediction raises `Stopped`. This must be the last
    callback, because what the others do after a batch is part of that batch.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        def pass_on(number: int) -> None:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(number)
            if trainer.predicting:
                trainer.should_stop = True  # no further picture of this batch is begun

        stop.on_signal = pass_on

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1:
            # Lightning asks its own handler of SIGTERM in each batch, which waits for the device; ours replaced it.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            self._agree()  # not at the first step, for a device: some make more pictures than others

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        # Never reset in training: once something is learned, no signal may interrupt before it is saved.
        stop.busy_with = "this batch"

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if number := int(stop.signal or 0) if trainer.world_size == 1 else self._agree():
            stop.signal = signal.Signals(number)
            trainer.should_stop = True

    def _agree(self) -> int:
        """The signal that any of the processes got, or 0. Waits for all processes, but for no device."""
        number = torch.tensor(int(stop.signal or 0))
        distributed.all_reduce(number, distributed.ReduceOp.MAX, cpu_group())
        return int(number)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stop.install_handlers()  # Lightning has just put its own, which would let the prediction go on

    def on_predict_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        stop.busy_with = "this one"

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        stop.busy_with = None
        stop.check()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if is_lost_peer(exception):
            faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=2)
        self._release()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        """`stop` outlives the run: a function left in it would keep the trainer and its model in memory."""
        stop.busy_with = None
        stop.on_signal = lambda number: None
