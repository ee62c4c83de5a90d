"""Metrics of a run: metrics.csv with a row for each step, the loggers, and the numbers of the progress bar."""

import csv
import logging
import math
import statistics
import time
from itertools import islice
from typing import Any, NamedTuple

import lightning.pytorch as L
import psutil
import torch

from callbacks.loggers import alert
from lightning_modules.edit_module import EditModule
from lightning_modules.timing import NOT_TRAINING
from report.diagnosis import FIRST_STEPS, STEPS, diverged
from report.tables import read_metrics, write_rows
from runs.run_folder import RunFolder

log = logging.getLogger("retouch")

COLUMNS = (
    *("step", "loss", "loss_avg", "grad_norm", "lr", "samples_per_second", "tokens_per_second", "data_wait"),
    *("peak_memory_gb", "seconds"),
)
# Steps of the running mean of the loss.
WINDOW = 50


class _Step(NamedTuple):
    """An optimizer step; `figures` are on the device: gradient norm, loss and, of a T-LoRA, rank."""

    number: int
    lr: float
    seconds: float
    figures: torch.Tensor


class _Clock(NamedTuple):
    """Seconds until now: in total, outside of training, and waiting for data."""

    total: float
    aside: float
    waited: float

    @classmethod
    def now(cls, trainer: L.Trainer, module: EditModule) -> "_Clock":
        loader: Any = trainer.train_dataloader
        aside = module.base.timer.seconds.get(NOT_TRAINING, 0.0)
        return cls(time.perf_counter(), aside, loader.waited if loader is not None else 0.0)


class Metrics(L.Callback):
    """Measure each optimizer step over its whole accumulation window and over all processes; warn if it diverges.

    - loss: mean of the window; loss_avg: running mean of the last `WINDOW` steps;
    - active_rank: rank of a T-LoRA, the mean over the samples;
    - peak_memory_gb: peak of steps, without sample images and checkpoints, on the GPU; without one, of the process;
    - data_wait: share of the time in which steps waited for data.

    Steps leave their figures on the device, and are read back a logging interval at a time. Rates, which are totals of
    all processes, and waiting are those of an interval.
    """

    def __init__(self, output_dir: str) -> None:
        self.path = RunFolder(output_dir).metrics
        self.latest: dict[str, float] = {}
        self.losses: list[float] = []
        self._diverged = False
        self.peak_memory = 0
        self._process = psutil.Process()
        self._losses: list[torch.Tensor] = []
        self._ranks: list[torch.Tensor] = []
        self._samples = self._tokens = 0
        self._steps: list[_Step] = []
        self._step = 0
        self._lr = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        self._step = trainer.global_step
        self._interval = _Clock.now(trainer, pl_module)
        self._start = self._interval.total
        if trainer.is_global_zero:
            # A resumed run repeats the steps after its checkpoint.
            earlier = [row for row in read_metrics(self.path) if int(row["step"]) <= self._step] if self._step else []
            columns = (*COLUMNS, "active_rank") if pl_module.rank_gates else COLUMNS
            write_rows(self.path, earlier, columns)
            self._file = self.path.open("a", encoding="utf-8", newline="", buffering=1)
            self._writer = csv.DictWriter(self._file, columns, extrasaction="ignore", restval="")
            self.losses = [float(row["loss"]) for row in earlier]
            self._start -= float(earlier[-1]["seconds"]) if earlier else 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: EditModule, *args: Any) -> None:
        if pl_module.device.type == "cuda":  # memory that was used between steps does not count
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: EditModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # at the end of the step the scheduler has moved on

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: EditModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(pl_module.device)
        else:
            memory = self._process.memory_info().rss
        self.peak_memory = max(self.peak_memory, memory)
        self._losses.append(outputs["losses"].mean())  # Lightning divides "loss" by the accumulation
        if "active_ranks" in outputs:
            self._ranks.append(outputs["active_ranks"].float().mean())
        self._samples += len(batch.keys)
        self._tokens += outputs["tokens"]
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        means = [torch.stack(values).float().mean() for values in (self._losses, self._ranks) if values]
        figures = torch.stack([pl_module.optimization.grad_norm.float(), *means])
        seconds = time.perf_counter() - self._start
        self._steps.append(_Step(self._step, self._lr, seconds, figures))
        self._losses, self._ranks = [], []
        if pl_module.optimization.is_reported(trainer):
            self._read_back(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: EditModule, checkpoint: dict[str, Any]) -> None:
        self._read_back(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        self._read_back(trainer, pl_module)

    def _read_back(self, trainer: L.Trainer, module: EditModule) -> None:
        """Write the rows of the steps since the last call; waits for the device."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        figures = torch.stack([step.figures for step in steps])
        counts = torch.tensor([self._samples, self._tokens], dtype=torch.float64)
        self._samples = self._tokens = 0
        if trainer.world_size > 1:
            figures = trainer.strategy.reduce(figures, reduce_op="mean")
            counts = trainer.strategy.reduce(counts.to(module.device), reduce_op="mean").cpu()
        samples, tokens = counts.tolist()
        start, self._interval = self._interval, _Clock.now(trainer, module)
        seconds = self._interval.total - start.total - (self._interval.aside - start.aside)
        rates = {
            "samples_per_second": samples * trainer.world_size / seconds,
            "tokens_per_second": tokens * trainer.world_size / seconds,
            "data_wait": (self._interval.waited - start.waited) / seconds,
            "peak_memory_gb": self.peak_memory / 1e9,
        }
        for step, (grad_norm, loss, *rank) in zip(steps, figures.tolist(), strict=True):
            self.losses.append(loss)
            recent = list(islice(filter(math.isfinite, reversed(self.losses)), WINDOW))  # without skipped steps
            self.latest = {
                "loss": loss,
                "loss_avg": statistics.fmean(recent or [loss]),
                "grad_norm": grad_norm,
                "lr": step.lr,
                **rates,
                "seconds": step.seconds,
                **({"active_rank": rank[0]} if rank else {}),
            }
            if trainer.is_global_zero and not math.isfinite(grad_norm):
                alert(trainer.loggers, f"step {step.number} is skipped: not finite", "warn", step=step.number)
            if trainer.is_global_zero:
                self._writer.writerow({"step": step.number, **{k: f"{v:.6g}" for k, v in self.latest.items()}})
            if trainer.is_global_zero and step.number % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
                for logger in trainer.loggers:
                    logger.log_metrics(self.latest, step.number)
        first, last = self.losses[: max(FIRST_STEPS)], self.losses[max(FIRST_STEPS) :][-STEPS - len(steps) :]
        if trainer.is_global_zero and not self._diverged and (line := diverged([*first, *last])):
            self._diverged = True
            log.warning(f"note: {line}")

    def teardown(self, trainer: L.Trainer, pl_module: EditModule, stage: str) -> None:
        if hasattr(self, "_file"):
            self._file.close()
