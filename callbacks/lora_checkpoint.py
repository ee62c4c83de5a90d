"""LoRA weights for the world, checkpoints to go on from, and leaving cleanly when asked to."""

import logging
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L

from datamodules.files import replacing
from lightning_modules.base import EditModule
from lightning_modules.lora import WEIGHTS_NAME, save_lora

log = logging.getLogger("retouch")


class LoRACheckpoint(L.Callback):
    """Every `save_every` steps, at the end, and when told to stop: lora/step-N, lora/last and checkpoints/last.ckpt.

    SIGINT (Ctrl-C) and SIGTERM end the run after the batch in hand. A second Ctrl-C interrupts at once.

    Args:
        output_dir: the run's folder.
        save_every: optimizer steps between two savings; 0 saves at the end only.
        model_name: the name of the model's YAML, and
        model: its composed settings, for the header of the LoRA files: predict.py needs no more.
    """

    def __init__(self, output_dir: str, save_every: int, model_name: str, model: Mapping[str, Any]) -> None:
        self.output_dir = Path(output_dir)
        self.save_every = save_every
        # Plain values only: a file from elsewhere must not be able to name what is called.
        plain = {k: v for k, v in model.items() if v is None or isinstance(v, str | int | float)}
        self.model: dict[str, Any] = {"name": model_name} | {
            k: v for k, v in plain.items() if k not in ("_target_", "seed")
        }
        self.saved_step = -1
        self.signal: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.saved_step = trainer.global_step
        # Lightning has put its own handler for SIGTERM by now, which would leave without saving.
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        stop = self.signal is not None
        if trainer.world_size > 1:
            stop = trainer.strategy.reduce_boolean_decision(stop, all=False)
        if stop:
            trainer.should_stop = True
        due = self.save_every > 0 and step % self.save_every == 0
        if (due or stop or step == trainer.max_steps) and step != self.saved_step:
            self.save(trainer, pl_module)

    def save(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write all three; the older files stay where writing fails."""
        assert isinstance(pl_module, EditModule)
        assert pl_module.adapter is not None
        assert pl_module.transformer is not None
        step = self.saved_step = trainer.global_step
        if trainer.is_global_zero:
            header = {
                "adapter": pl_module.adapter.metadata(),
                "model": self.model,
                "step": step,
                **pl_module.provenance(),
            }
            file = self.output_dir / "lora" / f"step-{step:06d}" / WEIGHTS_NAME
            save_lora(pl_module.transformer, file, pl_module.adapter.alpha, header)
            with replacing(self.output_dir / "lora" / "last" / WEIGHTS_NAME) as temporary:
                shutil.copyfile(file, temporary)
        if trainer.is_global_zero:
            with replacing(self.output_dir / "checkpoints" / "last.ckpt") as temporary:
                trainer.save_checkpoint(temporary)
        else:
            trainer.save_checkpoint(self.output_dir / "checkpoints" / "last.ckpt")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restore_handlers()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        """Before Lightning restores its own: a handler left behind would keep the model in memory."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
