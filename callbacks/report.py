"""A run on one page: report.html, self-contained, to be looked at while it is written and long after."""

import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from omegaconf import OmegaConf

from callbacks import find_callback
from callbacks.sample_images import SampleImages
from callbacks.validation import Validation
from datamodules.base import TrainingData
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import NOT_TRAINING
from report.commands import Names, commands
from report.images import THUMBNAIL, data_url, read_strip, sample_files, to_image, write_grid
from report.page import render
from report.quoting import shareable, without_secrets
from report.tables import curves, headline, read_metrics, read_rows
from runs.run_folder import RunFolder, best_effort

# The page is written again when it is this old, and reloads itself as often.
SECONDS_BETWEEN_PAGES = 15


class Report(L.Callback):
    """Writes report.html at the start, every few seconds, after each set of sample pictures, and at the end.

    What it shows is read from files of the run: writing it does not wait for the device.

    Args:
        output_dir: the run's folder.
        model_name: the name of the model's YAML, for the commands.
        preview_count: samples of the data that it shows.
    """

    def __init__(self, output_dir: str, model_name: str, preview_count: int) -> None:
        self.run = RunFolder(output_dir)
        self.model_name = model_name
        self.preview_count = preview_count
        self._data: dict[str, Any] = {}
        self._started = False
        self._results: dict[Path, str] = {}  # as data URLs
        self._strips: dict[Path, dict[str, Any]] = {}  # of the last step's pictures
        self._config = ""
        self._sampled_step = -1
        self._written = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """At the first epoch: the first sample pictures and config.yaml are made in on_train_start."""
        assert isinstance(pl_module, EditModule)
        if self._started:
            return
        self._started = True
        if trainer.is_global_zero:
            self._renew(trainer, pl_module, now=True)
            pl_module.base.timer.listeners.append(lambda _: self._renew(trainer, pl_module))
        sampler = find_callback(trainer, SampleImages)
        self._sampled_step = -1 if sampler is None else sampler.sampled_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        sampler = find_callback(trainer, SampleImages)
        sampled = sampler is not None and sampler.sampled_step not in (self._sampled_step, -1)
        if sampler is not None:
            self._sampled_step = sampler.sampled_step
        if trainer.is_global_zero:
            self._renew(trainer, pl_module, now=sampled)

    def _renew(self, trainer: L.Trainer, module: L.LightningModule, now: bool = False) -> None:
        """Write the page if it is older than `SECONDS_BETWEEN_PAGES`, or now."""
        assert isinstance(module, EditModule)
        if now or time.monotonic() - self._written >= SECONDS_BETWEEN_PAGES:
            self._written = math.inf  # writing is noted as progress, too
            with module.base.timer.stage(NOT_TRAINING):
                self._write(trainer, module, unfinished=True)
            self._written = time.monotonic()

    def _strip(self, path: Path) -> dict[str, Any]:
        strip = read_strip(path)
        return {
            "strip": strip,
            "prompt": strip.prompt if strip.target else f"{strip.prompt} (of sample_root)",
            "controls": [data_url(control) for control in strip.controls],
            "target": data_url(strip.target) if strip.target else "",
            "size": "small" if max(strip.result.size) <= THUMBNAIL else "",
        }

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero and pl_module.transformer is not None:
            self._write(trainer, pl_module, unfinished=False)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the page once more, without the script by which it reloads itself."""
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero and pl_module.transformer is not None and self._started:
            self._write(trainer, pl_module, unfinished=False)

    def _write(self, trainer: L.Trainer, module: EditModule, unfinished: bool) -> None:
        if not unfinished:
            with best_effort("grid.png"):
                write_grid(self.run, self.run.grid)
        with best_effort("report"):
            self._write_page(trainer, module, unfinished)

    def _result(self, path: Path) -> str:
        if path not in self._results:
            self._results[path] = data_url(read_strip(path).result)
        return self._results[path]

    def _write_page(self, trainer: L.Trainer, module: EditModule, unfinished: bool) -> None:
        metrics, validation = read_metrics(self.run.metrics), read_rows(self.run.validation)
        samples = {step: files for step, files in sample_files(self.run).items() if step <= trainer.global_step}
        last = samples[max(samples)] if samples else {}
        self._strips = {path: self._strips.get(path) or self._strip(path) for path in last.values()}
        rows = []
        for name, path in last.items():
            results = [self._result(of_step[name]) if name in of_step else None for of_step in samples.values()]
            rows.append({**self._strips[path], "results": results})
        data = TrainingData.of(trainer)
        if not self._data:
            with best_effort("part of the report on the data"):
                self._data = describe_data(data, self.preview_count)
        if not self._config and self.run.config.is_file():
            self._config = OmegaConf.to_yaml(shareable(OmegaConf.to_container(OmegaConf.load(self.run.config))))
        step = trainer.global_step
        sampler, validated = find_callback(trainer, SampleImages), find_callback(trainer, Validation)
        seed = None if sampler is None else sampler.seed
        assert module.adapter is not None
        assert module.objective is not None
        what = [without_secrets(module.base.name), str(module.adapter), module.objective.chosen]
        what += [module.optimization.describe(), f"step {step} of {trainer.max_steps}", module.base.timer.now]
        render(
            self.run.report,
            title=self.run.path.name,
            subtitle=", ".join(filter(None, what)),
            lines=[] if validated is None else validated.best_lines(module.adapter.folder),
            numbers=headline(metrics, validation),
            rows=rows,
            steps=sorted(samples),
            results=[row["results"] for row in rows],
            pictures_title="Held-out pictures" if data.validation is not None else "Pictures of the training data",
            row_width=420 if not rows or rows[0]["size"] else 760,
            curves=curves(metrics, validation),
            commands=commands(
                module, Names.of_run(module, self.run, self.model_name), seed, rows[0]["strip"] if rows else None
            ),
            config=self._config,
            unfinished=unfinished,
            **self._data,
        )


def describe_data(data: TrainingData, count: int) -> dict[str, Any]:
    """The page's part on the data: what there is, and its first samples."""
    sizes = ", ".join(f"{n} of {width}x{height}" for (width, height), n in data.size_counts().most_common(6))
    thumbs = [
        {"pictures": [data_url(to_image(one), THUMBNAIL) for one in raw.images], "caption": raw.prompts[0]}
        for raw in data.pixels(count)
    ]
    lines = [without_secrets(line) for line in (data.describe(), sizes, *data.notes)]
    return {"data_lines": lines, "thumbs": thumbs}
