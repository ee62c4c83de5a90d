"""model.gradient_checkpointing=auto: the least recomputation that fits into the GPU memory."""

import logging
from typing import Any

import lightning.pytorch as L
import torch
from rich.filesize import decimal

from datamodules.pairs import PairsDataModule
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.memory import USABLE, Calibration, DeviceMemory, calibrate
from lightning_modules.timing import NOT_TRAINING
from runs.run_folder import best_effort

log = logging.getLogger("retouch")


class RaiseCheckpointing(L.Callback):
    """Begin with `full` checkpointing, and reduce it after each of the first steps while memory is left.

    It acts only if `Execution.searches_checkpointing`, on a GPU. All processes choose the same policy.
    """

    def __init__(self) -> None:
        self._calibration: Calibration | None = None
        self._memory: DeviceMemory | None = None
        self._taken = self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        data, execution = PairsDataModule.of(trainer), pl_module.execution
        if not execution.searches_checkpointing:
            return
        self._first_step = trainer.global_step
        self._memory = DeviceMemory(pl_module.device)
        assert pl_module.objective is not None
        timer, what = pl_module.base.timer, "estimate for gradient_checkpointing=auto, which stays full"
        with timer.stage(NOT_TRAINING), best_effort(what):
            self._calibration = calibrate(execution, data, pl_module.objective.passes(0))
        lacks = torch.tensor(float(self._calibration is None), device=pl_module.device)
        if trainer.strategy.reduce(lacks, reduce_op="max"):  # in any process
            self._calibration = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if self._calibration is not None and self._memory is not None:
            self._memory.restart()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._calibration is not None and self._memory is not None:  # images may be sampled later in the batch
            self._taken = self._memory.taken()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        calibration, memory = self._calibration, self._memory
        # In the first step the optimizer creates its state.
        if calibration is None or memory is None or trainer.global_step <= self._first_step + 1:
            return
        assert isinstance(pl_module, EditModule)
        # All processes use the largest consumption and the smallest free memory.
        mine = [calibration.excess(self._taken, outputs["tokens"]), -memory.free()]
        together = torch.tensor(mine, dtype=torch.float64, device=pl_module.device)
        excess, less = trainer.strategy.reduce(together, reduce_op="max").tolist()
        free = -less
        calibration.after_step(excess, free)
        if not calibration.is_done:
            pl_module.execution.set_checkpointing(pl_module.transformer, calibration.policy)
            return
        expected, usable = calibration.expected(calibration.policy), round(USABLE * free)
        log.info(
            f"model.gradient_checkpointing=auto is {calibration.policy}: a step takes {decimal(expected)} of the "
            f"{decimal(usable)} that are free"
        )
        self._calibration = None
