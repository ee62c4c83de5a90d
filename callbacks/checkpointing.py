"""model.gradient_checkpointing=auto: the least recomputation that fits into the GPU memory."""

import logging
import math
from typing import Any

import lightning.pytorch as L
import torch
from rich.filesize import decimal

from datamodules.pairs import PairsDataModule
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.memory import USABLE, DeviceMemory, choose_policy, fits, policy_needs
from lightning_modules.timing import NOT_TRAINING
from runs.run_folder import best_effort

log = logging.getLogger("retouch")


class RaiseCheckpointing(L.Callback):
    """Train the first step with `full` checkpointing, the others with the least recomputation that the memory allows.

    It acts only if `Execution.searches_checkpointing`, on a GPU. All processes choose the same policy. A resumed run
    whose blocks are compiled begins with the policy of the run before if that fits into this device's memory, since its
    first step would round differently.
    """

    def __init__(self) -> None:
        self._memory: DeviceMemory | None = None  # until the policy is chosen
        self._policy: str | None = None
        self._needs: dict[str, int] = {}
        self._excess = 1.0  # bytes of a real step relative to its estimate
        self._tokens = self._taken = self._first_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self._policy, "excess": self._excess}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._policy, self._excess = state_dict["policy"], state_dict["excess"]

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        if not pl_module.execution.searches_checkpointing:
            return
        self._memory, self._first_step = DeviceMemory(pl_module.device), trainer.global_step
        timer, what = pl_module.base.timer, "estimate for gradient_checkpointing=auto, which stays full"
        with timer.stage(NOT_TRAINING), best_effort(what):
            data, passes = PairsDataModule.of(trainer), pl_module.objective.passes(0)
            self._needs, self._tokens = policy_needs(pl_module.execution, data, passes)
        if self._policy is None or not pl_module.execution.compiles:
            return
        if fits(self._needs, self._policy, *self._worst(self._excess, self._memory, trainer)):
            self._memory = None
            pl_module.execution.set_checkpointing(pl_module.transformer, self._policy)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        if self._memory is not None and self._needs:
            self._memory.restart()

    def on_after_backward(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        if self._memory is not None and self._needs:  # images may be sampled later in the batch
            self._taken = self._memory.taken()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: EditModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        memory, needs = self._memory, self._needs
        if memory is None or trainer.global_step == self._first_step:  # the optimizer has no state yet
            return
        self._memory = None
        mine = self._taken * self._tokens / (needs["full"] * outputs["tokens"]) if needs else 1.0
        excess, free = self._worst(mine, memory, trainer)
        policy = choose_policy(needs, excess, free)
        if excess < math.inf:
            self._excess = excess
            taken, usable = round(max(1, excess) * needs[policy]), round(USABLE * free)
            log.info(
                f"model.gradient_checkpointing=auto is {policy}: a step takes {decimal(taken)} of the "
                f"{decimal(usable)} that are free"
            )
        self._policy = policy
        pl_module.execution.set_checkpointing(pl_module.transformer, policy)

    def _worst(self, excess: float, memory: DeviceMemory, trainer: L.Trainer) -> tuple[float, float]:
        """Return the largest excess of all processes, infinite if one has no estimate, and the least free memory."""
        mine = [excess, -memory.free()] if self._needs else [math.inf, 0.0]
        together = torch.tensor(mine, dtype=torch.float64, device=memory.device)
        excess, less = trainer.strategy.reduce(together, reduce_op="max").tolist()
        return excess, -less
