"""Results of a sweep: sweep.csv and report.html, updated after each job."""

import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from foundation.files import read_bytes, replacing
from foundation.internals import result_of
from report.tables import metric_names, read_metrics, read_validation, write_rows
from runs.run_folder import RunFolder, best_effort, shorten

log = logging.getLogger("retouch")

# Folder with a file for each job's row.
ROWS = ".jobs"


class SweepSummary(Callback):
    """A Hydra callback that collects a row of each job of a multirun.

    Jobs may run on several machines at once: each writes its row to a file, and then the summary of all rows. Hydra
    imports this file before it looks at the command, so images are imported later.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.folder = Path(config.hydra.sweep.dir)
        shutil.rmtree(self.folder / ROWS, ignore_errors=True)
        logs = OmegaConf.select(config, "hydra.launcher.submitit_folder")
        if logs is not None:
            log.info(f"jobs are queued; their output goes to {shorten(logs).parent}")

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        if self.folder is not None:
            log.info(f"job {config.hydra.job.num}: {' '.join(config.hydra.overrides.task)}")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if self.folder is not None and not self.rows and any((self.folder / ROWS).glob("[!.]*.json")):
            self._summarize(self.folder)  # the jobs ran elsewhere, with their output

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if self.folder is None:
            return
        run = RunFolder(config.hydra.runtime.output_dir)
        curve, measured, weights = read_metrics(run.metrics), read_validation(run.validation), run.saved_weights()
        failed, result = job_return.status is not JobStatus.COMPLETED, result_of(job_return)
        end = json.loads(read_bytes(run.finished)) if run.finished.is_file() else {}
        row = {
            "job": run.path.name,
            "overrides": "",
            "final_loss": curve[-1]["loss_avg"] if curve else "",
            **({name: measured[-1][name] for name in metric_names(measured[-1])} if measured else {}),
            "monitor": end.get("monitor", ""),
            "more_is_better": end.get("more_is_better", ""),
            "value": "" if failed or result is None else result,
            "seconds": curve[-1]["seconds"] if curve else "",
            "lora": "" if weights is None else str(weights),
            "error": str(result) if failed else "",
        }
        with replacing(self.folder / ROWS / f"{row['job']}.json") as temporary:
            temporary.write_text(json.dumps([list(job_return.overrides or []), row]), encoding="utf-8")
        self._summarize(self.folder)

    def _summarize(self, folder: Path) -> None:
        self.rows = _read_jobs(folder)
        compared = Counter((row["monitor"], row["more_is_better"]) for row in self.rows if row["monitor"])
        monitor, higher = next((one for one, _ in compared.most_common(1)), ("the monitored figure", False))

        def order(row: Mapping[str, Any]) -> tuple[bool, float]:
            """Order the best first, and last the jobs without a value, or with one of another figure."""
            comparable = _is_known(row) and row["monitor"] == monitor
            return (False, -row["value"] if higher else row["value"]) if comparable else (True, 0.0)

        rows = sorted(self.rows, key=order)
        with best_effort("sweep.csv"):
            write_rows(folder / "sweep.csv", self.rows)
        with best_effort("report.html"):
            _write_page(folder, rows, monitor, "more" if higher else "less")
        if len(rows) > 1:
            best, here = rows[0], shorten(folder)
            line = f"{monitor} of no job is known"
            if _is_known(best):
                found = f"{monitor} {best['value']:.4g} with {best['overrides']} in {here / best['job']}"
                line = f"best of {len(rows)} jobs so far: {found}"
            log.info(f"{line}; all of them: {here / 'report.html'}")


def _read_jobs(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all jobs so far, each with the overrides that distinguish it from the others."""
    paths = sorted((folder / ROWS).glob("[!.]*.json"), key=lambda path: (len(path.stem), path.stem))
    jobs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    common = set.intersection(*(set(overrides) for overrides, _ in jobs))
    for overrides, row in jobs:
        row["overrides"] = " ".join(override for override in overrides if override not in common) or row["job"]
    return [row for _, row in jobs]


def _is_known(row: Mapping[str, Any]) -> bool:
    return row["value"] != "" and math.isfinite(row["value"])


def _write_page(folder: Path, rows: list[dict[str, Any]], monitor: str, better: str) -> None:
    """Write the page with the jobs and their images in this order."""
    from report.images import THUMBNAIL, data_url, last_strips
    from report.page import render
    from report.quoting import without_secrets

    jobs = []
    for row in rows:
        run = RunFolder(folder / row["job"])
        images = [[*strip.controls, strip.result, strip.target] for strip in islice(last_strips(run), 4)]
        jobs.append(
            {
                "name": row["job"],
                "link": run.report.relative_to(folder).as_posix() if run.report.is_file() else "",
                "overrides": without_secrets(row["overrides"]),
                "value": f"{row['value']:.4g}" if row["value"] != "" else "failed",
                "strips": [[data_url(image, THUMBNAIL) for image in strip if image] for strip in images],
            }
        )
    render(
        folder / "report.html",
        title=folder.name,
        subtitle=f"{len(rows)} runs, by {monitor}, {better} is better",
        jobs=jobs,
        monitor=monitor,
    )
