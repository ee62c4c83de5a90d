"""Model cards alongside the weights of a run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
from omegaconf import OmegaConf

from callbacks import find_callback
from callbacks.lora_checkpoint import LoRACheckpoint
from callbacks.sample_images import SampleImages
from callbacks.validation import Validation
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import NOT_TRAINING
from report.card import Card
from report.origin import Origin
from runs.run_folder import RunFolder, best_effort

README = "README.md"


class ModelCard(L.Callback):
    """Write README.md, with images, to each folder of weights that has none or an older one; at the end to all.

    Args:
        output_dir: the run's folder.
        model_name: name of the model's YAML.
        repository: destination of the upload, None without one.
    """

    def __init__(self, output_dir: str, model_name: str, repository: str | None) -> None:
        self.run = RunFolder(output_dir)
        self.model_name = model_name
        self.repository = repository
        self._origin: Origin | None = None
        self._seen: tuple[int, int] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero:
            self._origin = Origin.of(pl_module.base, self.model_name)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        keeper, sampler = find_callback(trainer, LoRACheckpoint), find_callback(trainer, SampleImages)
        seen = -1 if keeper is None else keeper.saved_step, -1 if sampler is None else sampler.sampled_step
        if seen != self._seen:
            self._seen = seen
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, pl_module, again=("last", "best"))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, again: tuple[str, ...] = ()) -> None:
        assert isinstance(module, EditModule)
        if self._origin is None or module.transformer is None:  # another process, or a run that did not start
            return
        assert module.adapter is not None
        sampler, validation = find_callback(trainer, SampleImages), find_callback(trainer, Validation)
        seed = None if sampler is None else sampler.seed
        lines = [] if validation is None else validation.best_lines(module.adapter.folder)
        config = OmegaConf.load(self.run.config) if self.run.config.is_file() else OmegaConf.create()
        with module.base.timer.stage(NOT_TRAINING), best_effort(README):
            for folder, step in self._weights(trainer, module).items():
                with best_effort(f"{README} in {folder}"):
                    if is_outdated(folder) or (folder.name in again and (folder / README).is_file()):
                        names = self.model_name, self.repository
                        card = Card(self.run, module, *names, config, self._origin, folder, step, seed, lines)
                        card.write(trainer, folder / README)

    def _weights(self, trainer: L.Trainer, module: EditModule) -> dict[Path, int]:
        """Return the folders of weights that images are sampled with, and the step of each."""
        assert module.adapter is not None
        found = {folder: step for step, folder in self.run.saved_steps(module.adapter.folder).items()}
        keeper, validation = find_callback(trainer, LoRACheckpoint), find_callback(trainer, Validation)
        if keeper is not None:
            found[self.run.weights(module.adapter.folder, "last")] = keeper.saved_step
        if validation is not None and (row := validation.best()) is not None:
            found[self.run.weights(module.adapter.folder, "best")] = int(row["step"])
        return found


def is_outdated(folder: Path) -> bool:
    """Return whether a folder with weights has no card, or one that is older than they are."""
    files = [path for path in folder.rglob("[!.]*") if path.is_file()]
    weights = [path.stat().st_mtime_ns for path in files if path.name != README and path.suffix != ".png"]
    card = folder / README
    return bool(weights) and (not card.is_file() or card.stat().st_mtime_ns < max(weights))
