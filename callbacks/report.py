"""The report of a run, report.html: one self-contained page, written during the run and at its end."""

import functools
import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from omegaconf import OmegaConf

from callbacks import find_callback
from callbacks.sample_images import SampleImages
from callbacks.validation import Validation
from datamodules.pairs import PairsDataModule
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import NOT_TRAINING
from report.commands import Names, commands
from report.images import THUMBNAIL, data_url, last_strips, read_strip, sample_files, sample_rows, to_image, write_grid
from report.page import render
from report.quoting import one_line, shareable, without_secrets
from report.tables import curves, headline, read_metrics, read_validation
from runs.run_folder import RunFolder, best_effort

log = logging.getLogger("retouch")

# The page is written again at this age at least, and reloads itself as often; and it takes a share of the time at most.
SECONDS_BETWEEN_PAGES, SHARE_OF_TIME = 15, 0.01


class Report(L.Callback):
    """Write report.html at the start, every few seconds, and at the end.

    Its content is read from files of the run, so that writing it does not wait for the GPU.
    """

    def __init__(self, output_dir: str, model_name: str) -> None:
        self.run = RunFolder(output_dir)
        self.model_name = model_name
        self._data: dict[str, Any] = {}
        self._data_urls = functools.cache(_data_urls)
        self._written = 0.0  # until the first page
        self._pause = float(SECONDS_BETWEEN_PAGES)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        """Write the first page in the first epoch, after the first sample images and config.yaml."""
        if trainer.is_global_zero and not self._written:
            self._renew(trainer, pl_module, now=True)
            log.info(f"report: {self.run.report}, kept up to date")
            pl_module.base.timer.listeners.append(lambda _: self._renew(trainer, pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        if trainer.is_global_zero:
            self._renew(trainer, pl_module)

    def _renew(self, trainer: L.Trainer, module: EditModule, now: bool = False) -> None:
        start = time.monotonic()
        if now or start - self._written >= self._pause:
            self._written = math.inf  # writing is noted as progress as well
            with module.base.timer.stage(NOT_TRAINING), best_effort("report"):
                self._write(trainer, module, unfinished=True)
            self._written = time.monotonic()
            self._pause = max(SECONDS_BETWEEN_PAGES, (self._written - start) / SHARE_OF_TIME)

    def on_train_end(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        self._finish(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: EditModule, exception: BaseException) -> None:
        if self._written:
            self._finish(trainer, pl_module)

    def _finish(self, trainer: L.Trainer, module: EditModule) -> None:
        """Write grid.png, and the page without the script that reloads it."""
        self._written = math.inf  # later work, such as model cards, does not write it again
        if trainer.is_global_zero and module.transformer is not None:
            with best_effort("grid.png"):
                write_grid(self.run, self.run.grid)
            with best_effort("report"):
                self._write(trainer, module, unfinished=False)

    def _write(self, trainer: L.Trainer, module: EditModule, unfinished: bool) -> None:
        metrics, validation = read_metrics(self.run.metrics), read_validation(self.run.validation)
        samples = sample_files(self.run, trainer.global_step)
        rows, data = sample_rows(samples, lambda path, part: self._data_urls(path)[part]), PairsDataModule.of(trainer)
        rows = [row | {"prompt": one_line(row["prompt"])} for row in rows]
        strip = next(last_strips(self.run, trainer.global_step), None)
        strip = strip and strip._replace(prompt=one_line(strip.prompt))
        if not self._data:
            with best_effort("part of the report on the data"):
                self._data = _describe(data)
        settings = OmegaConf.load(self.run.config) if self.run.config.is_file() else OmegaConf.create()
        sampler, validated = find_callback(trainer, SampleImages), find_callback(trainer, Validation)
        names = Names.of_run(module, self.run, self.model_name)
        seed = None if sampler is None else sampler.seed
        lines = [] if validated is None else validated.best_lines(module.adapter.folder)
        if validated is not None and (failure := validated.failure([float(row["loss"]) for row in metrics])):
            lines.insert(0, failure)
        facts = [without_secrets(module.base.name), str(module.adapter), module.objective.chosen]
        facts += [module.optimization.describe(), f"step {trainer.global_step} of {trainer.max_steps}"]
        render(
            self.run.report,
            title=self.run.path.name,
            subtitle=", ".join(filter(None, [*facts, module.base.timer.now])),
            lines=lines,
            numbers=headline(metrics, validation),
            rows=rows,
            steps=sorted(samples),
            images_title="Held-out images" if data.validation is not None else "Images of the training data",
            curves=curves(metrics, validation),
            commands=commands(module, names, seed, strip),
            config=OmegaConf.to_yaml(shareable(OmegaConf.to_container(settings))),
            unfinished=unfinished,
            **self._data,
        )


def _data_urls(path: Path) -> list[str]:
    return list(map(data_url, read_strip(path).parts))


def _describe(data: PairsDataModule) -> dict[str, Any]:
    """Return the page's part on the data: its size, and its first samples."""
    sizes = ", ".join(f"{n} of {width}x{height}" for (width, height), n in data.training.size_counts()[:6])
    thumbs = [
        {"images": [data_url(to_image(one), THUMBNAIL) for one in raw.images], "caption": one_line(raw.prompts[0])}
        for raw in data.pixels(data.training, slice(data.preview_count))
    ]
    lines = [without_secrets(line) for line in (data.describe(), sizes, *data.notes)]
    return {"data_lines": lines, "thumbs": thumbs}
