"""Progress in the terminal: a summary before step 1, then a bar; plain lines if the output is no terminal."""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as L
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from callbacks import find_callback
from callbacks.metrics import Metrics
from datamodules.pairs import PairsDataModule
from foundation.errors import UserError, listing
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.peft_layers import layer_of
from lightning_modules.adapters.targets import ending
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import SECONDS_BETWEEN_LINES
from runs.run_folder import RunFolder

log = logging.getLogger("retouch")


def panel(title: str, rows: Mapping[str, str], notes: Iterable[str]) -> Panel:
    """Draw a box with the facts of a run, one a row, and notes below them."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    for note in notes:
        table.add_row("[bold yellow]note[/bold yellow]", escape(note))
    return Panel(table, title=title, title_align="left", expand=False)


def learning(module: EditModule, transformer: nn.Module, sizes: Iterable[tuple[int, int]]) -> dict[str, str]:
    """Return rows about the objective, the optimizer, the adapted layers and the timesteps.

    Args:
        transformer: with its adapter.
        sizes: (width, height) of targets, the most frequent first.
    """
    objective = module.objective.chosen
    adapted = dict.fromkeys(layer_of(name) for name in trainable(transformer))
    endings = listing(list(dict.fromkeys(map(ending, adapted))), 14)
    law = module.flow.timesteps
    timesteps = law.law if law.shift is None else f"{law.law}, shift {law.shift}"
    if law.shift == "dynamic":
        for width, height in list(sizes)[:1]:
            tokens = module.geometry.image_tokens(module.base.latent_size(width, height))
            timesteps += f", {module.base.dynamic_shift(tokens):.2f} at {width}x{height}"
    return {
        **({"objective": objective} if objective else {}),
        "learns by": module.optimization.describe(),
        **({} if module.adapter.trains_base else {"layers": f"{len(adapted)}: {endings}"}),
        "timesteps": timesteps,
    }


def training_facts(trainer: L.Trainer, module: EditModule) -> dict[str, str]:
    """Return rows about the training of a run, for the summary and for model cards."""
    data, assistant, ema = PairsDataModule.of(trainer), module.execution.training_adapter, module.optimization.ema
    counts = data.training.size_counts()
    sizes = [f"{n} of {width}x{height}" for (width, height), n in counts[:4]]
    windows = trainer.accumulate_grad_batches * trainer.world_size
    budget = data.max_tokens_per_batch
    batch = f"batch {data.batch_size * windows}" if budget is None else f"batches of {budget * windows:,} tokens"
    epochs = trainer.max_steps * trainer.accumulate_grad_batches / data.sampler().batches_per_epoch()
    rows = {
        "trains": module.adapter.describe(module.trained.parameters()),
        "sizes": ", ".join(sizes) + (f" and {len(counts) - 4} more" if len(counts) > 4 else ""),
        "steps": f"{trainer.max_steps:,}, {batch}: {epochs:,.1f} epochs",
        **learning(module, module.transformer, [size for size, _ in counts[:1]]),
    }
    if assistant is not None:
        rows["trains"] += f", with model.training_adapter={assistant.name} in training only"
    if ema is not None and ema.sample_with == "ema":
        rows["learns by"] += f", averaged with a half-life of {ema.half_life:g} samples"
    return rows


class TrainingProgress(L.Callback):
    """A summary before step 1, then loss, speed and time left: a bar in a terminal, elsewhere a line now and then."""

    def __init__(self, output_dir: str) -> None:
        self.run = RunFolder(output_dir)
        self.console = Console(stderr=True)
        self._bar: Progress | None = None

    def begin(self, done: int, total: int) -> None:
        """Start counting at `done` of `total`.

        The estimate of the time left excludes the first step, which warms up, and includes work between the steps.
        """
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            *([BarColumn()] if self.console.width >= 100 else []),  # else it would cut the numbers off
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=math.inf,
            get_time=time.monotonic,
            disable=not self.console.is_terminal,
        )
        self._numbers, self._last_line = "", time.monotonic()
        self._bar.add_task("", total=total, completed=done, shown="")
        [self._task] = self._bar.tasks
        self._bar.start()

    def advance(self, done: int, numbers: str) -> None:
        """Show the present count; in lines the first, the last, and those of some time later than the one before."""
        assert self._bar is not None
        self._numbers = numbers
        self._bar.update(self._task.id, completed=done, shown=numbers)
        left = self._task.time_remaining
        if left is None or self._task.finished or self._is_line_due:
            self._print(numbers, *([] if left is None else [f"left {timedelta(seconds=left)}"]))

    def show_work(self, words: str) -> None:
        """Show work between two steps, such as sampling; without words show the numbers again."""
        if self._bar is not None:
            self._bar.update(self._task.id, shown=words or self._numbers)
            if words and self._is_line_due:
                self._print(words)

    @property
    def _is_line_due(self) -> bool:
        return time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES

    def _print(self, *words: str) -> None:
        if not self.console.is_terminal:
            self._last_line = time.monotonic()
            log.info("  ".join([f"step {self._task.completed}/{self._task.total}", *words]))

    def teardown(self, trainer: L.Trainer, pl_module: EditModule, stage: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    on_exception = teardown

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        metrics = find_callback(trainer, Metrics)
        if metrics is None:
            raise UserError("callbacks.progress shows what callbacks.metrics measures: remove both, or neither")
        self._metrics = metrics
        self._step = trainer.global_step
        if not trainer.is_global_zero:
            return
        data = PairsDataModule.of(trainer)
        rows = {
            "model": f"{pl_module.base.title} ({pl_module.base.source.precision}) on {pl_module.base.device}",
            "on": data.describe(),
            **training_facts(trainer, pl_module),
            "results": str(self.run),
        }
        if self._step:
            rows["resumed"] = f"after step {self._step}"
        self.console.print(panel("Retouch", rows, data.notes))
        self.begin(self._step, trainer.max_steps)
        pl_module.base.timer.listeners.append(self.show_work)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: EditModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step or not trainer.is_global_zero:
            return
        self._step = trainer.global_step
        now = self._metrics.latest
        numbers = f"loss {now['loss_avg']:.4f}  lr {now['lr']:.2g}  {now['samples_per_second']:.3g} samples/s"
        self.advance(self._step, numbers)
