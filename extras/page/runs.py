"""The tab Runs: the runs below outputs/, one of them, several compared, and buttons that act on a running one."""

import io
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from cli.arguments import require_own
from cli.resuming import OF_A_START
from extras.page.answers import number, page, post
from extras.page.jobs import Jobs, require_no_link, user_of
from extras.page.progress import advice, mean_of_schedule, memory, monitored, time_left
from foundation.errors import UserError, listing, printable
from foundation.files import read_bytes, reading, reason, require_file
from foundation.locks import LOCK
from foundation.settings import flat_settings
from report.images import compared_rows, opened_png, read_strip, sample_files, sample_rows
from report.quoting import argument, override, program, shareable
from report.tables import COLORS, compared_curves, curves, headline, last_metrics, read_metrics, read_validation
from runs.config_file import read_config, resolvable
from runs.run_folder import REQUESTS, RunFolder

# Figures of the list by their columns.
FIGURES = {"loss": "loss_avg", "samples/s": "samples_per_second"}
# Bytes of a log that are shown, runs on one page of the list, and longer side of a thumbnail in pixels.
LOG, LISTED, SMALL = 20_000, 200, 384
# A run on another machine counts as running while its report, written every 15 s, is younger.
SECONDS_OF_A_REPORT = 120
# Two images at a time are decoded: each may take a gigabyte.
DECODING = threading.BoundedSemaphore(2)
# A page of its own without cookies: its content may come from elsewhere.
REPORT_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; sandbox allow-scripts"
)


class Shelf:
    """The runs below a folder, by their path in it."""

    def __init__(self, outputs: Path) -> None:
        self.outputs = outputs

    def runs(self) -> dict[str, RunFolder]:
        """Return the runs, also of sweeps, and commands that the page has started and that are no run yet."""
        found: dict[str, RunFolder] = {}
        for folder in subfolders(self.outputs):
            here = [folder] if _is_run(folder) else filter(_is_run, subfolders(folder))  # a run contains no others
            found |= {one.relative_to(self.outputs).as_posix(): RunFolder(one) for one in here}
        return {name: run for name, run in found.items() if name.isprintable()}  # else no address can name it

    def get(self, name: str) -> RunFolder:
        """Return a run by its name; any other path is not found. The other runs are not read."""
        parts = tuple(name.split("/"))
        plain = name.isprintable() and Path(name).parts == parts and not any(one.startswith(".") for one in parts)
        if not (plain and len(parts) <= 2 and _is_run(folder := self.outputs / name)):
            raise HTTPException(404, f"{printable(name)} was not found. Go back to the list.")
        return RunFolder(folder)

    def found(self, search: str = "", sort: str = "") -> list[str]:
        """Return the names of runs with these words; those that run, then the newest first, or sorted by -COLUMN."""
        runs = self.runs()
        names = sorted(runs, key=lambda name: (state_of(runs[name]) == "running", started(runs[name])), reverse=True)
        if words := search.lower().split():
            texts = {name: f"{name} {_model(run)} {tail(run.note)} {state_of(run)}" for name, run in runs.items()}
            names = [name for name in names if all(word in texts[name].lower() for word in words)]
        if (column := sort.removeprefix("-")) in SORTS:
            names.sort(key=lambda name: SORTS[column](name, runs[name]), reverse=sort != column)
        return names


def subfolders(folder: Path, most: int | None = None) -> list[Path]:
    """Return the visible folders among the first `most` entries of a folder; none if it cannot be read."""
    with suppress(OSError), os.scandir(folder) as found:
        visible = [one for one in islice(found, most) if not one.name.startswith(".")]
        # A link may lead to a closed folder.
        return [Path(one.path) for one in visible if (os.path.isdir(one) if one.is_symlink() else one.is_dir())]
    return []


def _is_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in ("config.yaml", "log.txt"))


def _time(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def started(run: RunFolder) -> float:
    return _time(run.config if run.config.is_file() else run.path)


def _model(run: RunFolder) -> str:
    """Return the name of a run's model; the rest of its config.yaml is not parsed."""
    found = re.search("^model_name: (.+)$", tail(run.config), re.MULTILINE)
    return found[1] if found else ""


def _last(run: RunFolder, column: str) -> float:
    """Return a figure of a run's last step, 0 without one."""
    with suppress(OSError, ValueError, KeyError):
        return float(last_metrics(run.metrics)[column])
    return 0.0


# Columns of the list by which it is sorted.
SORTS: dict[str, Callable[[str, RunFolder], Any]] = {
    "run": lambda name, run: name,
    "date": lambda name, run: started(run),
    "duration": lambda name, run: _last(run, "seconds"),
    "state": lambda name, run: state_of(run),
    "step": lambda name, run: _last(run, "step"),
    "model": lambda name, run: _model(run),
}


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Return the content of a run's config.yaml; nothing before it is written."""
    return _settings(run.config, run.config.stat().st_mtime_ns) if run.config.is_file() else {}


@lru_cache(1000)
def _settings(path: Path, modified: int) -> dict[str, Any]:
    return read_config(path)


def resolved(path: Path, key: str) -> Any:
    """Return a setting in a config.yaml, which may refer to another one."""
    return OmegaConf.select(_composed(path, path.stat().st_mtime_ns), key, throw_on_resolution_failure=False)


@lru_cache(1000)
def _composed(path: Path, modified: int) -> Any:
    try:
        return OmegaConf.create(shareable(resolvable(path)))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {reason(error)}. Repair or remove it.") from error


def mean_rank(run: RunFolder) -> int | None:
    """Return the mean rank of a T-LoRA's schedule over the timesteps; None for a LoRA of one rank."""
    keys = ("rank_schedule", "rank", "min_rank", "alpha_rank_scale")
    with suppress(OSError, ValueError, TypeError, ArithmeticError, UserError):
        kind, *figures = (resolved(run.config, f"adapter.{key}") for key in keys)
        return None if kind in (None, "constant") else mean_of_schedule(*map(float, figures))
    return None


def state_of(run: RunFolder) -> str:
    """Return running, finished, stopped (it can be resumed) or failed."""
    if (owner := user_of(run.path)) is not None:
        written = max(map(_time, (run.report, run.metrics, run.path / LOCK)))
        if owner.is_here or time.time() - written < SECONDS_OF_A_REPORT:
            return "running"
    return "finished" if run.finished.is_file() else "stopped" if run.checkpoint.is_file() else "failed"


def summarize(name: str, run: RunFolder) -> dict[str, Any]:
    """Return a run's row of the list; in a damaged run's, the reason replaces the model."""
    row: dict[str, Any] = {"name": name, "state": "failed", "step": "0", "max_steps": None, "figures": {}}
    row |= {"model": "", "thumb": "", "duration": "", "note": tail(run.note)}
    row["date"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(started(run)))
    try:
        with reading(run.path, "repair or remove it"):
            row |= {"state": state_of(run), "thumb": _thumb(run)}
            last, settings = last_metrics(run.metrics), settings_of(run)
            row["step"], row["model"] = last.get("step", "0"), settings.get("model_name", "")
            row["max_steps"] = settings.get("trainer", {}).get("max_steps")
            if isinstance(row["max_steps"], str):
                row["max_steps"] = resolved(run.config, "trainer.max_steps")
            row["figures"] = {shown: float(last[key]) for shown, key in FIGURES.items() if key in last}
            if measured := read_validation(run.validation):
                monitor = monitored(settings, measured[-1])
                row["figures"][monitor] = measured[-1][monitor]
            if "seconds" in last:
                row["duration"] = str(timedelta(seconds=round(float(last["seconds"]))))
    except UserError as error:
        row["model"] = reason(error)
    return row


def _sample_rows(name: str, run: RunFolder) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the steps with sample images, and the rows of `sample_rows`."""
    samples = sample_files(run)

    def address(path: Path, part: int) -> str:
        step = path.parent.name.removeprefix("step-")
        return "/image?" + urlencode({"run": name, "sample": f"{int(step)}/{path.stem}", "part": part})

    return list(samples), sample_rows(samples, address)


def tail(path: Path) -> str:
    """Return the end of a file's text, "" without one."""
    with suppress(OSError):
        require_file(path)
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG))
            return file.read().decode(errors="replace")
    return ""


def _last_words(log: str) -> str:
    """Return the last line of a log outside of boxes."""
    return next((line for line in reversed(log.splitlines()) if line[:1].isalnum()), "starting")


def differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, each with its values; those of a start are left out."""
    flat = [flat_settings(shareable(settings_of(run))) for run in runs]
    rows = []
    for key in sorted({key for one in flat for key in one if key.partition(".")[0] not in OF_A_START}):
        if len({str(one.get(key)) for one in flat}) > 1:  # as written; resolving all takes seconds
            values = [str(resolved(run.config, key) if run.config.is_file() else None) for run in runs]
            rows += [(key, values)] if len(set(values)) > 1 else []
    return rows


def _thumb(run: RunFolder) -> str:
    """Return step and name of the newest sample image, for its address; "" without one."""
    for step, folder in reversed(run.sampled_steps().items()):
        named = (path for path in folder.glob("[!.]*.png") if path.name.isprintable())
        if (first := min(named, default=None)) is not None:
            return f"{step}/{first.stem}"
    return ""


@lru_cache(512)
def _image(path: Path, modified: int, part: str) -> bytes:
    """Return a part of a sample image by its index, or a thumbnail of the whole; as WebP, without loss if small."""
    with DECODING:
        if part == "all":
            with opened_png(path) as file:
                image = file.convert("RGB")
            image.thumbnail((SMALL, SMALL))
        else:
            image = read_strip(path).parts[int(part)]
    buffer = io.BytesIO()
    image.save(buffer, format="WEBP", lossless=max(image.size) <= SMALL, quality=90)
    return buffer.getvalue()


class RunsPage:
    """Routes of the tab."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs = shelf, jobs

    def routes(self) -> list[Route]:
        gets = {"/runs": self.show_all, "/run": self.show, "/compare": self.compare}
        gets |= {"/report": self.report, "/image": self.image}
        return [*(Route(*one) for one in gets.items()), post("/ask", self.ask), post("/resume", self.resume)]

    def show_all(self, request: Request) -> Response:
        """Show the list."""
        asked = {name: request.query_params.get(name, "")[:200] for name in ("search", "sort", "first")}
        first = number(asked["first"])
        names = self.shelf.found(asked["search"], asked["sort"])
        found = [summarize(name, self.shelf.get(name)) for name in names[first : first + LISTED]]
        queue: list[str] = []
        with suppress(UserError):  # a damaged queue, which Start shows
            queue = [one for one in self.jobs.waiting() if asked["search"].lower() in f"{one} queued".lower()]
        values: dict[str, Any] = {"runs": found, "count": len(names), "first": first, "listed": LISTED, "asked": asked}
        values |= {"queue": queue, "failed": self.jobs.failed, "columns": SORTS, "urlencode": urlencode}
        return page("runs.html", tab="runs", **values)

    def show(self, request: Request) -> Response:
        """Show a run."""
        name = request.query_params.get("run", "")
        run = self.shelf.get(name)
        with reading(run.path, "repair or remove it"):
            metrics, validation = read_metrics(run.metrics), read_validation(run.validation)
            (steps, rows), summary = _sample_rows(name, run), summarize(name, run)
            job = RunFolder(run.path / "export")
            exported = tail(job.log)
            owner, log = user_of(run.path) if summary["state"] == "running" else None, tail(run.log)
            loads = owner is not None and not (metrics and _time(run.metrics) > _time(run.path / LOCK))
            left = None if loads or not owner else time_left(metrics, summary["max_steps"], _time(run.metrics))
            return page(
                "run.html",
                tab="runs",
                run=summary,
                numbers=[*headline(metrics, validation), *(memory(owner.pid) if owner and owner.is_here else ())],
                doing=_last_words(log) if loads else "",
                left=left,
                advice=advice(settings_of(run), metrics, validation),
                curves=curves(metrics, validation) if metrics else [],
                rows=rows,
                steps=steps,
                log=log,
                trains=run.requests.is_dir(),
                files=run.lora_files(),
                rank=mean_rank(run),
                export=exported and _last_words(exported),
                exports=user_of(job.path) is not None,
                asked=[one for one in REQUESTS if (run.requests / one).exists()],
                config=yaml.safe_dump(shareable(settings_of(run)), sort_keys=False, allow_unicode=True),
                report=run.report.is_file(),
                commands=self._commands(run, summary["state"]),
            )

    def _commands(self, run: RunFolder, state: str) -> dict[str, str]:
        if state == "running":
            return {name: f"touch {shlex.quote(str(run.requests / name))}" for name in REQUESTS}
        resume = f"{program('train')} {override('output_dir', str(run))} ckpt_path=last"
        return {"resume": resume} if state == "stopped" else {}

    def compare(self, request: Request) -> Response:
        """Show the curves of several runs, and the settings that differ."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 < len(names) <= len(COLORS):
            raise UserError(f"choose 2 to {len(COLORS)} runs to compare, not {len(names)}")
        runs = {name: self.shelf.get(name) for name in names}
        with reading(f"one of {listing(names, len(COLORS))}", "repair or remove it"):
            tables = {name: (read_metrics(run.metrics), read_validation(run.validation)) for name, run in runs.items()}
            steps, rows = compared_rows({name: _sample_rows(name, run) for name, run in runs.items()})
            return page(
                "compare.html",
                tab="runs",
                names=names,
                curves=compared_curves(tables),
                differences=differences(list(runs.values())),
                steps=steps,
                rows=rows,
            )

    def report(self, request: Request) -> Response:
        """Show a run's report.html, whose script and style are inside it."""
        run = self.shelf.get(request.query_params.get("run", ""))
        if not run.report.is_file():
            raise HTTPException(404, f"{run} has no report yet")
        with reading(run.report, "remove it"):
            text = read_bytes(run.report).decode(errors="replace")
        return HTMLResponse(text, headers={"content-security-policy": REPORT_POLICY})

    def image(self, request: Request) -> Response:
        """Return a sample image, or a part of it."""
        asked = request.query_params
        run = self.shelf.get(asked.get("run", ""))
        files = {f"{step}/{name}": path for step, named in sample_files(run).items() for name, path in named.items()}
        try:
            path = files[asked.get("sample", "")]
            content = _image(path, path.stat().st_mtime_ns, asked.get("part", "all"))
        except (LookupError, ValueError, OSError) as error:
            raise HTTPException(404, "this image was not found") from error
        return Response(content, media_type="image/webp", headers={"cache-control": "private, max-age=60"})

    def ask(self, request: Request, form: FormData) -> Response:
        """Ask a running run to sample, save or stop after its step; before the first one, stop it by a signal."""
        run, what = self.shelf.get(str(form.get("run"))), str(form.get("request"))
        if what not in REQUESTS:
            raise HTTPException(404, f"a run is asked for {listing(list(REQUESTS))}, not {what}")
        if state_of(run) != "running":
            raise UserError(f"{run} does not run")
        require_no_link(self.shelf.outputs, run.requests / what)
        owner = user_of(run.path)
        if what == "stop" and not run.requests.is_dir() and owner is not None and owner.is_here:
            os.kill(owner.pid, signal.SIGTERM)  # Windows ends it at once
        else:
            try:
                run.ask(what)
            except FileNotFoundError as error:
                raise UserError(f"{run} does not train yet: ask again after its first step") from error
        return HTMLResponse("", headers={"hx-refresh": "true"})

    def resume(self, request: Request, form: FormData) -> Response:
        """Resume a stopped run."""
        run = self.shelf.get(str(form.get("run")))
        if state_of(run) != "stopped":
            raise UserError(f"{run} cannot be resumed: it is {state_of(run)}")
        require_own(run.config)
        self.jobs.start([argument("output_dir", str(run)), "ckpt_path=last"], run)
        return HTMLResponse("", headers={"hx-refresh": "true"})
