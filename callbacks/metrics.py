"""What a run reports: metrics.csv after every step, the loggers, and the numbers that the progress bar shows."""

import csv
import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import psutil
import torch

from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.flops import matrix_peak
from lightning_modules.timing import NOT_TRAINING
from runs.run_folder import RunFolder

COLUMNS = (
    "step",
    "loss",
    "loss_avg",
    "grad_norm",
    "lr",
    "samples_per_second",
    "tokens_per_second",
    "data_wait",
    "tflops",
    "peak_memory_gb",
    "seconds",
)


@dataclass
class _Step:
    """Of one optimizer step; `figures` are on the device: gradient norm, loss, and where there is one the rank."""

    number: int
    lr: float
    samples: int
    tokens: int
    flops: int
    seconds: float
    figures: torch.Tensor


@dataclass
class _Interval:
    """The clock and the running totals at its start, in seconds: spent beside training, waited for data."""

    seconds: float
    aside: float
    waited: float


class Metrics(L.Callback):
    """Measures each optimizer step over its whole accumulation window and over all processes.

    loss is the mean of the window, loss_avg the running mean of the last `window` steps; active_rank is a T-LoRA's, the
    mean over the samples; peak memory is that of steps, without sample pictures and savings, on the device, or where
    there is none of the process at their ends. Steps leave their figures on the device, to be read back a logging
    interval at a time: rates (of all processes together), waiting and work are an interval's. data_wait is the share of
    the time that steps waited for data; tflops the useful work of the transformer, 10^12 operations a second and
    device; peak_share its share of what a matrix product reaches there.

    Args:
        output_dir: the run's folder.
        window: steps of the running mean.
    """

    def __init__(self, output_dir: str, window: int) -> None:
        self.path = RunFolder(output_dir).metrics
        self.running: deque[float] = deque(maxlen=window)
        self.latest: dict[str, float] = {}
        self.peak_memory = 0
        self._process = psutil.Process()
        self._losses: list[torch.Tensor] = []
        self._ranks: list[torch.Tensor] = []
        self._samples = self._tokens = self._flops = 0
        self._steps: list[_Step] = []
        self._step = self._first_step = 0
        self._interval = _Interval(0.0, 0.0, 0.0)
        self._lr = 0.0
        self._seconds_before = 0.0  # in earlier starts of the run
        self.peak: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        self._step = self._first_step = trainer.global_step
        if pl_module.device.type == "cuda":
            self.peak = matrix_peak(pl_module.device, dtype=pl_module.base.dtype)
        if trainer.is_global_zero:
            earlier = self._rows_until(trainer.global_step)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", newline="", buffering=1)
            optional = {"active_rank": bool(pl_module.rank_gates), "peak_share": self.peak is not None}
            columns = (*COLUMNS, *(name for name, measured in optional.items() if measured))
            self._writer = csv.DictWriter(self._file, columns, extrasaction="ignore", restval="")
            self._writer.writeheader()
            self._writer.writerows(earlier)
            for row in earlier:
                self._remember(float(row["loss"]))
                self._seconds_before = float(row["seconds"])
        self._interval = self._now(trainer, pl_module)
        self._run_start = self._interval.seconds - self._seconds_before

    def _now(self, trainer: L.Trainer, module: EditModule) -> "_Interval":
        aside = module.base.timer.seconds.get(NOT_TRAINING, 0.0)
        loader: Any = trainer.train_dataloader
        return _Interval(time.perf_counter(), aside, loader.waited if loader is not None else 0.0)

    def _remember(self, loss: float) -> None:
        """Count a loss in the running mean, unless its step was not applied."""
        if math.isfinite(loss):
            self.running.append(loss)

    def _rows_until(self, step: int) -> list[dict[str, str]]:
        """The rows of a resumed run up to its checkpoint; the steps after it are about to be repeated."""
        if step == 0 or not self.path.is_file():
            return []
        with self.path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if int(row["step"]) <= step]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if pl_module.device.type == "cuda":  # memory that was used between steps does not count
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # of this step; at its end the scheduler has moved on

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, EditModule)
        self.peak_memory = max(self.peak_memory, self._memory(pl_module.device))
        self._losses.append(outputs["losses"].mean())  # Lightning divides "loss" by the accumulation
        if "active_ranks" in outputs:
            self._ranks.append(outputs["active_ranks"].float().mean())
        self._samples += len(batch.keys)
        self._tokens += outputs["tokens"]
        self._flops += outputs["flops"]
        if trainer.global_step == self._step:
            return
        assert pl_module.optimization.grad_norm is not None
        self._step = trainer.global_step
        means = [torch.stack(values).float().mean() for values in (self._losses, self._ranks) if values]
        figures = torch.stack([pl_module.optimization.grad_norm.float(), *means])
        seconds = time.perf_counter() - self._run_start
        self._steps.append(_Step(self._step, self._lr, self._samples, self._tokens, self._flops, seconds, figures))
        self._losses, self._ranks, self._samples, self._tokens, self._flops = [], [], 0, 0, 0
        if pl_module.optimization.is_reported(trainer):
            self.read_back(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        assert isinstance(pl_module, EditModule)
        self.read_back(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        self.read_back(trainer, pl_module)

    def read_back(self, trainer: L.Trainer, module: EditModule) -> None:
        """Write the rows of the steps since the last time; waits for the device."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        figures = torch.stack([step.figures for step in steps])
        counts = torch.tensor([[step.samples, step.tokens, step.flops] for step in steps], dtype=torch.float64)
        if trainer.world_size > 1:
            figures = trainer.strategy.reduce(figures, reduce_op="mean")
            counts = trainer.strategy.reduce(counts.to(module.device), reduce_op="mean").cpu()
        samples, tokens, flops = counts.sum(dim=0).tolist()
        rows = figures.tolist()
        now = self._now(trainer, module)
        seconds = now.seconds - self._interval.seconds - (now.aside - self._interval.aside)
        waited, self._interval = now.waited - self._interval.waited, now
        rates = {
            "samples_per_second": samples * trainer.world_size / seconds,
            "tokens_per_second": tokens * trainer.world_size / seconds,
            "data_wait": waited / seconds,
            "tflops": flops / seconds / 1e12,
            **({} if self.peak is None else {"peak_share": flops / seconds / self.peak}),
            "peak_memory_gb": self.peak_memory / 1e9,
        }
        for step, (grad_norm, loss, *rank) in zip(steps, rows, strict=True):
            self._remember(loss)
            self.latest = {
                "loss": loss,
                "loss_avg": statistics.fmean(self.running or [loss]),
                "grad_norm": grad_norm,
                "lr": step.lr,
                **rates,
                "seconds": step.seconds,
                **({"active_rank": rank[0]} if rank else {}),
            }
            if trainer.is_global_zero:
                self._writer.writerow({"step": step.number, **{k: f"{v:.6g}" for k, v in self.latest.items()}})
            if trainer.is_global_zero and step.number % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
                for logger in trainer.loggers:
                    logger.log_metrics(self.latest, step.number)

    def _memory(self, device: torch.device) -> int:
        """Bytes allocated on the device at most in this batch, or resident in the process now."""
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return self._process.memory_info().rss

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if hasattr(self, "_file"):
            self._file.close()
