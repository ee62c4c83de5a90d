"""LoRA weights for predict.py and other tools, and checkpoints to resume from."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from shutil import disk_usage, rmtree
from typing import Any

import lightning.pytorch as L
import torch
from rich.filesize import decimal

from datamodules.pairs import PairsDataModule
from foundation.errors import UserError
from foundation.files import link_or_copy, replacing
from lightning_modules.adapters.adapter import trainable
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.memory import bytes_per_parameter
from lightning_modules.inference import averaged_weights
from lightning_modules.lora_files.writing import modelspec
from lightning_modules.pretrained.repository import resolve_dtype
from lightning_modules.timing import NOT_TRAINING
from report.origin import published
from report.quoting import one_line
from runs.run_folder import RunFolder
from runs.signals import stop

log = logging.getLogger("retouch")

# Settings that LoRA files do not record: of the run and its machine, and of training only.
NOT_RECORDED = ("_target_", "seed", "gradient_checkpointing", "compile", "attention_backend", "training_adapter")


def model_header(name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a LoRA file's header on its model, from which predict.py composes the settings.

    It contains plain values only, because predict.py accepts no others from a file.

    Args:
        name: name of the model's YAML.
        model: its composed settings.
    """
    header: dict[str, Any] = {"name": name, **_plain(model)}
    header["sampling"] = _plain(model.get("sampling") or {})
    if quantization := model.get("quantization"):
        lists = {k: list(v) for k, v in quantization.items() if isinstance(v, Sequence) and not isinstance(v, str)}
        header["quantization"] = _plain(quantization) | lists
    return header


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in settings.items() if v is None or isinstance(v, str | int | float)}
    return {k: v for k, v in plain.items() if k not in NOT_RECORDED}


class LoRACheckpoint(L.Callback):
    """Save lora/step-N, lora/last and checkpoints/last.ckpt every `save_every` steps, when asked, and at the end.

    The former last.ckpt is kept as step-N.ckpt. As in every zip, each part of a checkpoint has its checksum. With an
    EMA, lora/step-N-raw and lora/last-raw are written as well, or -ema if images are sampled with the raw weights.

    Args:
        save_every: optimizer steps between two checkpoints; 0 saves at the end only.
        keep_checkpoints: number of checkpoints that are kept.
        keep_lora_files: number of folders lora/step-N that are kept; None for all.
        model: its composed settings, for the header of the LoRA files.
        dtype: dtype of the LoRA files, a name of `lora_files.writing.DTYPES`.
        trigger_word: trigger word of the captions, None without one.
    """

    def __init__(
        self,
        output_dir: str,
        save_every: int,
        keep_checkpoints: int,
        keep_lora_files: int | None,
        model_name: str,
        model: Mapping[str, Any],
        dtype: str,
        trigger_word: str | None,
    ) -> None:
        self.run = RunFolder(output_dir)
        self.dtype = resolve_dtype(dtype, "export.dtype", "float16")
        self.save_every = save_every
        self.keep_checkpoints, self.keep_lora_files = keep_checkpoints, keep_lora_files
        self.model = model_header(model_name, model)
        self.trigger_word = one_line(trigger_word or "")
        self.saved_step = -1
        self._was_read_back = False

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        self.saved_step = trainer.global_step
        self._was_read_back = trainer.global_step > 0  # by an earlier start of the run
        if trainer.is_global_zero:
            self.run.remove_unfinished()
            count = sum(parameter.numel() for parameter in trainable(pl_module).values())
            needed = self.disk_bytes(pl_module, count, trainer.max_steps - trainer.global_step)
            free = disk_usage(self.run.path).free
            if free + sum(path.stat().st_size for path in self.run.checkpoints()) < sum(needed.values()):
                what = " and ".join(f"{name} of {decimal(size)}" for name, size in needed.items())
                raise UserError(
                    f"output_dir={self.run}: the run writes {what}, and {decimal(free)} are free. Free some, choose "
                    "another disk, raise save_every, or set keep_lora_files=3."
                )

    def disk_bytes(self, module: EditModule, trainable: int, steps: int) -> dict[str, int]:
        """Return the bytes that so many steps write, by name, given the number of trainable parameters."""
        averages = 1 + (module.optimization.ema is not None)  # the files of an EMA come twice
        saves = max(1, steps // self.save_every) if self.save_every else 1
        files = min(saves, self.keep_lora_files or saves) if not module.adapter.trains_base else 0
        in_checkpoint = 4 * averages + bytes_per_parameter(module.optimization.optimizer)
        return {
            "weights": (files + 2) * averages * trainable * self.dtype.itemsize,  # last and best
            # One more while a new one is written.
            "checkpoints": round((min(saves, self.keep_checkpoints) + 1) * trainable * in_checkpoint),
        }

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        due = self.save_every > 0 and trainer.global_step % self.save_every == 0
        if due or "save" in stop.requests or trainer.global_step == trainer.max_steps:
            self.save(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        self.save(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: EditModule, exception: BaseException) -> None:
        """Save the weights once training has begun; several processes cannot agree on it when one has failed."""
        alone, started = trainer.world_size == 1, self.saved_step >= 0
        if alone and started and isinstance(exception, UserError | torch.OutOfMemoryError):
            with suppress(UserError):  # the disk may be what failed
                self.save(trainer, pl_module)

    def save(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        """Save if there was a step since the last time. If writing fails, the older files stay."""
        if trainer.global_step == self.saved_step or pl_module.transformer is None:
            return
        with pl_module.base.timer.stage(NOT_TRAINING):
            pl_module.base.timer.note_progress("saving")
            self._save(trainer, pl_module)

    def write(self, trainer: L.Trainer, module: EditModule, *names: str, other: bool = False) -> None:
        """Write the weights that images are sampled with under each of these names.

        Args:
            other: write the other weights of a run with an EMA.
        """
        step = trainer.global_step
        header = {"adapter": module.adapter.metadata(), "model": self.model, "step": step, **module.base.provenance()}
        header["objective"] = module.objective.name
        roots = PairsDataModule.of(trainer).sample_set.roots
        if not all(root.caption_per_line for root in roots):
            header["caption_per_line"] = False
        sides = [side for root in roots for side in root.resolution]
        if sides and max(sides) != module.geometry.resolution:
            header["resolution"] = max(sides)
        if module.execution.training_adapter is not None:
            header["training_adapter"] = module.execution.training_adapter.name
        ema = module.optimization.ema
        with averaged_weights(module, other):
            if ema is not None and ema.in_use:
                header["ema"] = {"half_life": ema.half_life}
            gathered = module.adapter.gather(module.trained.parts)
            header = published(header, self.model["name"])
            # Not the name of the run: equal runs in two folders write equal files.
            title = f"LoRA for {header['base'].rpartition('/')[2]}, step {step}"
            model = self.model["name"], header["base"], self.model.get("resolution")
            header["modelspec"] = modelspec(*model, title=title, trigger_phrase=self.trigger_word)
            for name in names if trainer.is_global_zero else ():
                folder = self.run.weights(module.adapter.folder, name)
                module.adapter.write(folder, gathered, module.base, header, self.dtype)

    def _save(self, trainer: L.Trainer, module: EditModule) -> None:
        step = trainer.global_step
        names = ["last"] if module.adapter.trains_base else [f"step-{step:06d}", "last"]
        # All processes take part; the first one writes. The mark tells an interrupted first save from a run's weights.
        writes = trainer.is_global_zero
        with replacing(self.run.checkpoint) if writes else nullcontext(self.run.checkpoint) as path:
            if writes:
                self.run.unfinished_checkpoint.touch()
            self.write(trainer, module, *names)
            if (ema := module.optimization.ema) is not None:
                self.write(trainer, module, *(f"{name}-{ema.other}" for name in names), other=True)
            trainer.save_checkpoint(path)
            if writes:
                kept = self.run.checkpoint_of(self.saved_step)
                if self.keep_checkpoints > 1 and self.run.checkpoint.is_file() and not kept.exists():
                    link_or_copy(self.run.checkpoint, kept)
        if writes:
            self.run.unfinished_checkpoint.unlink()
        trainer.strategy.barrier()  # no process leaves before the files are in place
        self.saved_step = step
        if writes:
            for later, path in self.run.kept_checkpoints().items():
                if later >= step:  # skipped when resuming
                    path.unlink()
            for path in self.run.checkpoints()[self.keep_checkpoints :]:
                path.unlink()
            saved, most = list(self.run.saved_steps(module.adapter.folder).values()), self.keep_lora_files
            for folder in saved[:-most] if most else ():
                for one in (folder, *folder.parent.glob(f"{folder.name}-*")):  # with the second one of an EMA
                    rmtree(one)
        if writes and not self._was_read_back:
            weights = self.run.weights(module.adapter.folder, "last")
            if words := module.adapter.check_written(weights, module.base):
                log.info(f"saved {weights}: {words}")
            self._was_read_back = True
