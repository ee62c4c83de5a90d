"""Training and prediction leave cleanly when they are told to."""

import signal
from datetime import timedelta
from typing import Any

import lightning.pytorch as L
import torch
from torch import distributed

from callbacks.signals import stop
from datamodules.errors import UserError

# How long processes wait for the one that makes pictures and validates. NCCL, in which they would wait at their next
# step, gives up after half an hour.
PATIENCE = timedelta(days=1)


class GracefulStop(L.Callback):
    """A signal ends training after the step in hand, and prediction after the picture or sample in hand.

    Training ends as at its last step, so that it is saved; prediction raises `Stopped`. This must be the last callback:
    what the others do with a batch is a part of it.
    """

    def __init__(self) -> None:
        self._group: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        def pass_on(number: int) -> None:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(number)
            if trainer.predicting:
                trainer.should_stop = True  # no further picture of the batch is begun

        stop.on_signal = pass_on

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)
            # Lightning asks its own handler of SIGTERM, which is replaced, in each batch, and waits for the device.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            self._agree()  # here the others wait while the first makes pictures

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        stop.in_hand = "this batch"  # and from then on: what was learned is to be saved

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if number := int(stop.signal or 0) if trainer.world_size == 1 else self._agree():
            stop.signal = signal.Signals(number)
            trainer.should_stop = True

    def _agree(self) -> int:
        """The signal that one of the processes was told to stop by, or 0; waits for all of them, and for no device.

        Raises:
            UserError: another process has ended.
        """
        number = torch.tensor(int(stop.signal or 0))
        try:
            distributed.all_reduce(number, distributed.ReduceOp.MAX, self._group)
        except RuntimeError as error:
            raise UserError("another process of this run has ended: see what it said") from error
        return int(number)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stop.take_over()  # from Lightning, which would go on

    def on_predict_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        stop.in_hand = "this one"

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        stop.in_hand = None
        stop.check()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._let_go()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """A handler left behind would keep the model in memory."""
        stop.in_hand = None
        stop.on_signal = lambda number: None
