"""What a sweep found: sweep.csv, sweep.png and report.html, brought up to date after each job."""

import csv
import io
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from datamodules.files import replacing
from report.tables import metric_names, read_metrics, read_rows
from runs.run_folder import RunFolder, best_effort, shorten

log = logging.getLogger("retouch")

# A file for each job's row.
ROWS = ".jobs"
# Pixels of the longer side of sweep.png on the page.
FIGURE = 1100
# The job of a sweep that runs, for its summary: "2 of 3: optimizer.lr=1e-4".
sweep_job = ContextVar("sweep_job", default="")


class SweepSummary(Callback):
    """A Hydra callback: one row and one loss curve for each job of a multirun.

    Jobs may run on several machines at once: each writes its row to a file, and then the summary of all rows.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.folder: Path | None = None
        self._swept: set[str] = set()
        self._count = 0
        self.monitor = ""
        self.sign = 1.0  # -1 where more is better

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.folder = Path(config.hydra.sweep.dir)
        with best_effort("names of the jobs"):
            self._look_at(config.hydra)
        shutil.rmtree(self.folder / ROWS, ignore_errors=True)
        logs = OmegaConf.select(config, "hydra.launcher.submitit_folder")
        if logs is not None:
            log.info(f"jobs are queued; what they print goes to {shorten(logs).parent}")

    def _look_at(self, hydra: DictConfig) -> None:
        """Find the settings that differ between the jobs, and the number of these."""
        params = (hydra.sweeper.get("params") or {}).items()
        parser = OverridesParser.create()
        given = parser.parse_overrides([*hydra.overrides.task, *(f"{key}={value}" for key, value in params)])
        swept = [one for one in given if one.is_sweep_override()]
        self._swept = {one.get_key_element() for one in swept}
        count = hydra.sweeper.get("n_trials")
        self._count = count or math.prod(len(list(one.sweep_string_iterator())) for one in swept)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if self.folder is not None:
            own = [one for one in config.hydra.overrides.task if one.partition("=")[0] in self._swept]
            sweep_job.set(f"{config.hydra.job.num + 1} of {self._count}: {' '.join(own)}")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if self.folder is not None and not self.rows and any((self.folder / ROWS).glob("[!.]*.json")):
            self._summarize(self.folder, config)  # the jobs ran elsewhere, and what they printed is there

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        sweep_job.set("")
        if self.folder is None:
            return
        run = RunFolder(config.hydra.runtime.output_dir)
        curve = read_metrics(run.metrics)
        weights, measured = run.saved_weights(), read_rows(run.validation)
        failed = job_return.status is not JobStatus.COMPLETED
        end = json.loads(run.finished.read_text()) if run.finished.is_file() else {}
        row = {
            "job": run.path.name,
            "overrides": "",
            "final_loss": curve[-1]["loss_avg"] if curve else "",
            "best_loss": _best_loss(run, curve, config),
            **({name: measured[-1][name] for name in metric_names(measured[-1])} if measured else {}),
            "monitor": end.get("monitor", ""),
            "more_is_better": end.get("more_is_better", ""),
            "value": "" if failed or job_return._return_value is None else job_return._return_value,
            "seconds": curve[-1]["seconds"] if curve else "",
            "lora": "" if weights is None else str(weights),
            "error": str(job_return._return_value) if failed else "",
        }
        with replacing(self.folder / ROWS / f"{row['job']}.json") as temporary:
            temporary.write_text(json.dumps([list(job_return.overrides or []), row]), encoding="utf-8")
        self._summarize(self.folder, config)

    def _summarize(self, folder: Path, config: DictConfig) -> None:
        self.rows = _read_rows(folder)
        for name, write in {"sweep.csv": self._table, "sweep.png": self._plot, "report.html": self._report}.items():
            with best_effort(name):
                write(folder, config)
        # After each job: after the last one a sweep with a failed job shows Hydra's error only.
        if len(self.rows) < 2:
            return
        best, here = min(self.rows, key=self._order), shorten(folder)
        what = f"{self.monitor} of no job is known"
        if _known(best):
            found = f"{self.monitor} {best['value']:.4g} with {best['overrides']} in {here / best['job']}"
            what = f"best of {len(self.rows)} jobs so far: {found}"
        log.info(f"{what}; all of them: {here / 'report.html'}")

    def _order(self, row: Mapping[str, Any]) -> tuple[bool, float]:
        """Order the best first, then those that have no value, or one of another figure."""
        comparable = _known(row) and row["monitor"] == self.monitor
        return (False, self.sign * row["value"]) if comparable else (True, 0.0)

    def _table(self, folder: Path, config: DictConfig) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, dict.fromkeys(name for row in self.rows for name in row), restval="")
        writer.writeheader()
        writer.writerows(self.rows)
        with replacing(folder / "sweep.csv") as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8")

    def _report(self, folder: Path, config: DictConfig) -> None:
        """The jobs' pictures on one page, sorted by what the sweep compares."""
        # Hydra imports this file before it looks at the command.
        from PIL import Image

        from report.images import data_url
        from report.page import render

        compared = Counter((row["monitor"], row["more_is_better"]) for row in self.rows if row["monitor"])
        monitor, higher = next((one for one, _ in compared.most_common(1)), ("the monitored figure", False))
        self.monitor, self.sign = monitor, -1.0 if higher else 1.0
        render(
            folder / "report.html",
            title=folder.name,
            subtitle=f"{len(self.rows)} runs, by {monitor}, {'more' if higher else 'less'} is better",
            jobs=[_job(folder, row) for row in sorted(self.rows, key=self._order)],
            monitor=monitor,
            picture_names="control, result, target",
            figure=data_url(Image.open(folder / "sweep.png"), FIGURE) if (folder / "sweep.png").is_file() else "",
        )

    def _plot(self, folder: Path, config: DictConfig) -> None:
        import matplotlib

        from report.images import plot_text, write_figure

        matplotlib.use("agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        for row in self.rows:
            curve = read_metrics(RunFolder(folder / row["job"]).metrics)
            steps, losses = [int(r["step"]) for r in curve], [float(r["loss_avg"]) for r in curve]
            axes.plot(steps, losses, label=plot_text(row["overrides"]).lstrip("_"))
        axes.set(xlabel="step", ylabel="loss (running mean)")
        axes.grid(alpha=0.3)
        axes.legend()
        write_figure(figure, folder / "sweep.png", dpi=120)
        pyplot.close(figure)


def _read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all jobs so far; their overrides are what tells the jobs apart, which is known from the second on."""
    paths = sorted((folder / ROWS).glob("[!.]*.json"), key=lambda path: (len(path.stem), path.stem))
    jobs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    common = set.intersection(*(set(overrides) for overrides, _ in jobs))
    for overrides, row in jobs:
        row["overrides"] = " ".join(override for override in overrides if override not in common) or row["job"]
    return [row for _, row in jobs]


def _known(row: Mapping[str, Any]) -> bool:
    return row["value"] != "" and math.isfinite(row["value"])


def _best_loss(run: RunFolder, curve: list[dict[str, str]], config: DictConfig) -> float | str:
    """The least validation loss after step 0; without samples that are held out, the least running mean of a window."""
    if rows := read_rows(run.validation):
        return min((row["val_loss"] for row in rows if row["step"]), default="")
    window = OmegaConf.select(config, "callbacks.metrics.window", default=1)
    full = curve[window - 1 :] or curve[-1:]
    return min((float(row["loss_avg"]) for row in full), default="")


def _job(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """A job's row of the page."""
    from report.images import THUMBNAIL, data_url, read_strip, sample_files
    from report.quoting import without_secrets

    run = RunFolder(folder / row["job"])
    samples = sample_files(run)
    strips = [read_strip(path) for path in list(samples[max(samples)].values())[:4]] if any(samples) else []
    return {
        "name": row["job"],
        "link": str(run.report.relative_to(folder)) if run.report.is_file() else "",
        "overrides": without_secrets(row["overrides"]),
        "value": f"{row['value']:.4g}" if row["value"] != "" else "failed",
        "strips": [[data_url(one, THUMBNAIL) for one in (*s.controls, s.result, s.target) if one] for s in strips],
    }
