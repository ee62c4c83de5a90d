"""What a run reports: metrics.csv after every step, the loggers, and the numbers that the progress bar shows."""

import csv
import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import psutil
import torch

from lightning_modules.base import EditModule
from lightning_modules.components import ASIDE

COLUMNS = (
    "step",
    "loss",
    "loss_avg",
    "grad_norm",
    "lr",
    "samples_per_second",
    "tokens_per_second",
    "peak_memory_gb",
    "seconds",
)


class Metrics(L.Callback):
    """Measures each optimizer step over its whole accumulation window and over all processes.

    loss is the mean of the window, loss_avg the running mean of the last `window` steps; rates are those of all
    processes together; active_rank is a T-LoRA's, the mean over the samples; peak memory is the device's, or the
    process's where there is no device.

    Args:
        output_dir: the run's folder.
        window: steps of the running mean.
    """

    def __init__(self, output_dir: str, window: int) -> None:
        self.path = Path(output_dir) / "metrics.csv"
        self.running: deque[float] = deque(maxlen=window)
        self.latest: dict[str, float] = {}
        self.peak_memory = 0
        self._process = psutil.Process()
        self._losses: list[torch.Tensor] = []
        self._ranks: list[torch.Tensor] = []
        self._samples = 0
        self._tokens = 0
        self._step = 0
        self._start = 0.0
        self._lr = 0.0
        self._aside = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        self._step = trainer.global_step
        if trainer.is_global_zero:
            earlier = self._rows_until(trainer.global_step)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", newline="", buffering=1)
            columns = (*COLUMNS, "active_rank") if pl_module.rank_gates else COLUMNS
            self._writer = csv.DictWriter(self._file, columns)
            self._writer.writeheader()
            self._writer.writerows(earlier)
            for row in earlier:
                self._remember(float(row["loss"]))
        self._start = self._run_start = time.perf_counter()

    def _remember(self, loss: float) -> None:
        """Count a loss in the running mean, unless its step was not applied."""
        if math.isfinite(loss):
            self.running.append(loss)

    def _rows_until(self, step: int) -> list[dict[str, str]]:
        """The rows of a run that goes on; what came after its checkpoint is about to be done again."""
        if step == 0 or not self.path.is_file():
            return []
        with self.path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if int(row["step"]) <= step]

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # of this step; at its end the scheduler has moved on

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, EditModule)
        self._losses.append(pl_module.batch_loss)  # Lightning divides its own by the accumulation
        if pl_module.batch_rank is not None:
            self._ranks.append(pl_module.batch_rank)
        self._samples += len(batch.keys)
        self._tokens += pl_module.batch_tokens
        if trainer.global_step == self._step:
            return
        assert pl_module.grad_norm is not None
        self._step = trainer.global_step
        means = [torch.stack(values).float().mean() for values in (self._losses, self._ranks) if values]
        totals = torch.stack([*self._counts(pl_module.device), *means])
        if trainer.world_size > 1:
            totals = trainer.strategy.reduce(totals, reduce_op="mean")
            totals[:2] *= trainer.world_size
        samples, tokens, loss, *rank = totals.tolist()
        now, aside = time.perf_counter(), pl_module.stopwatch.seconds.get(ASIDE, 0.0)
        seconds = now - self._start - (aside - self._aside)
        self._start, self._aside = now, aside
        self._losses, self._ranks, self._samples, self._tokens = [], [], 0, 0
        self._remember(loss)
        self.peak_memory = self._measure_memory(pl_module.device)
        self.latest = {
            "loss": loss,
            "loss_avg": statistics.fmean(self.running or [loss]),
            "grad_norm": float(pl_module.grad_norm),
            "lr": self._lr,
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_gb": self.peak_memory / 1e9,
            "seconds": now - self._run_start,
            **({"active_rank": rank[0]} if rank else {}),
        }
        if trainer.is_global_zero:
            self._writer.writerow({"step": self._step, **{k: f"{v:.6g}" for k, v in self.latest.items()}})
            if self._step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
                for logger in trainer.loggers:
                    logger.log_metrics(self.latest, self._step)

    def _counts(self, device: torch.device) -> list[torch.Tensor]:
        return [torch.tensor(float(n), device=device) for n in (self._samples, self._tokens)]

    def _measure_memory(self, device: torch.device) -> int:
        """Bytes at the highest: allocated on the device, or resident in the process at the end of a step."""
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return max(self.peak_memory, self._process.memory_info().rss)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if hasattr(self, "_file"):
            self._file.close()
