"""What a sweep found: sweep.csv and sweep.png, brought up to date after each job."""

import csv
import io
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from callbacks.page import read_metrics, write_sweep
from datamodules.files import replacing


class SweepSummary(Callback):
    """A Hydra callback: one row and one loss curve for each job of a multirun."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.jobs: list[list[str]] = []
        self.folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.folder = Path(config.hydra.sweep.dir)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if self.folder is None:
            return
        run = Path(config.hydra.runtime.output_dir)
        curve = read_metrics(run)
        last = next((run / kind / "last" for kind in ("lora", "model") if (run / kind / "last").is_dir()), None)
        failed = job_return.status is not JobStatus.COMPLETED
        self.jobs.append(list(job_return.overrides or []))
        self.rows.append(
            {
                "job": run.name,
                "overrides": "",
                "final_loss": curve[-1]["loss_avg"] if curve else "",
                "best_loss": min((float(row["loss_avg"]) for row in curve), default=""),
                "value": "" if failed or job_return._return_value is None else job_return._return_value,
                "seconds": curve[-1]["seconds"] if curve else "",
                "lora": "" if last is None else str(last),
                "error": str(job_return._return_value) if failed else "",
            }
        )
        # Only what tells the jobs apart, which is known from the second job on.
        common = set.intersection(*map(set, self.jobs))
        for row, overrides in zip(self.rows, self.jobs, strict=True):
            row["overrides"] = " ".join(override for override in overrides if override not in common) or row["job"]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.rows[0]))
        writer.writeheader()
        writer.writerows(self.rows)
        with replacing(self.folder / "sweep.csv") as temporary:
            temporary.write_text(text.getvalue())
        self._plot(self.folder)
        self._report(config)

    def _report(self, config: DictConfig) -> None:
        """The jobs' pictures on one page, sorted by what the sweep compares."""
        assert self.folder is not None
        held_out = any((self.folder / row["job"] / "validation.csv").is_file() for row in self.rows)
        monitor = config.monitor or ("val_loss" if held_out else "loss_avg")
        metric = OmegaConf.select(config, f"callbacks.validation.metrics.{monitor.removesuffix('_source')}")
        kind: Any = None if metric is None else get_class(metric._target_)
        higher = kind is not None and bool(kind.higher_is_better)
        jobs = [{**row, "value": None if row["value"] == "" else row["value"]} for row in self.rows]
        write_sweep(self.folder, jobs, monitor, higher)

    def _plot(self, folder: Path) -> None:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        for row in self.rows:
            curve = read_metrics(folder / row["job"])
            steps, losses = [int(r["step"]) for r in curve], [float(r["loss_avg"]) for r in curve]
            axes.plot(steps, losses, label=row["overrides"])
        axes.set(xlabel="step", ylabel="loss (running mean)")
        axes.grid(alpha=0.3)
        axes.legend()
        with replacing(folder / "sweep.png") as temporary:
            figure.savefig(temporary, format="png", dpi=120)
        pyplot.close(figure)
