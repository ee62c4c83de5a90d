"""The folder of a run: every path below its output_dir, and writing files that may be missing."""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from foundation.files import link_below, read_bytes, reading, reason, remove_temporary, replacing

log = logging.getLogger("retouch")

# Files that request a running run to save, sample or stop, in the folder `requests`.
REQUESTS = ("save", "sample", "stop")


def shorten(folder: str | Path) -> Path:
    """Return a path below the working directory relative to it, other paths unchanged."""
    path = Path(folder)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Temporarily turn any error into a note that `what` is missing; HYDRA_FULL_ERROR=1 adds the traceback."""
    try:
        yield
    except Exception as error:
        line = reason(error)
        log.warning(f"note: no {what}: {line}", exc_info=os.environ.get("HYDRA_FULL_ERROR") == "1")


class End(NamedTuple):
    """The end of a run, the content of finished.json; a sweep compares the `value` of the figure `monitor`."""

    step: int
    value: float
    monitor: str
    more_is_better: bool
    stopped_early: bool


class RunFolder:
    """Paths of a run below its output_dir.

    Attributes:
        config: its settings; this file marks a folder as a run's.
        finished: the end of the run: its last step, and the value that a sweep compares.
        samples: folder of the sample images, with a folder for each step.
        metrics: table with a row for each optimizer step.
        validation: table with a row for each set of sample images.
        grid: control, before, after and target.
        log: output of its commands.
        note: a person's words on the run, after a star if it has one.
        active_ranks: histogram of the ranks of a T-LoRA.
        requests: folder of the files of `REQUESTS`; exists while the run trains.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.checkpoint = self.path / "checkpoints" / "last.ckpt"
        self.finished = self.path / "finished.json"
        self.samples = self.path / "samples"
        self.metrics = self.path / "metrics.csv"
        self.validation = self.path / "validation.csv"
        self.report = self.path / "report.html"
        self.grid = self.path / "grid.png"
        self.log = self.path / "log.txt"
        self.note = self.path / "note.txt"
        self.active_ranks = self.path / "active_ranks.png"
        self.requests = self.path / "requests"
        # A mark that exists during a save, and after one that has failed.
        self.unfinished_checkpoint = self.checkpoint.with_name(f".{self.checkpoint.name}.failed.tmp")

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunFolder":
        """Return the run that wrote this file."""
        return cls(checkpoint.parent.parent)

    def __str__(self) -> str:
        return str(self.path)

    def checkpoint_of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step once there is a newer one."""
        return self.checkpoint.with_name(f"step-{step:06d}.ckpt")

    def kept_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints before the last one by step."""
        return _by_step(self.checkpoint.parent.glob("step-*.ckpt"))

    def checkpoints(self) -> list[Path]:
        """Return all checkpoints, the newest first."""
        last = [self.checkpoint] if self.checkpoint.is_file() else []
        return [*last, *reversed(self.kept_checkpoints().values())]

    def unfinished_checkpoints(self) -> list[Path]:
        """Return the temporary files of interrupted saves."""
        return list(self.checkpoint.parent.glob(f".{self.checkpoint.name}.*.tmp"))

    def remove_unfinished(self) -> None:
        """Remove the temporary files and folders of a killed run, but not those of this process."""
        found = (path for depth in ("", "*/", "*/*/") for path in self.path.glob(f"{depth}.*.tmp"))
        remove_temporary(path for path in found if link_below(self.path, path) is None)

    def weights(self, kind: str, name: str) -> Path:
        """Return a folder of weights: step-000100, last or best, below the adapter's folder."""
        return self.path / kind / name

    def saved_weights(self) -> Path | None:
        """Return the folder `last`, or without it the newest folder with weights."""
        named = [folder for name in ("last", "best") for folder in self.path.glob(f"*/{name}")]
        named += _by_step(path for path in self.path.glob("*/step-*") if path.parent != self.samples).values()
        folders = [folder for folder in named if any(folder.glob("[!.]*"))]
        return max(folders, key=lambda folder: (folder.name == "last", folder.stat().st_mtime), default=None)

    def saved_steps(self, kind: str) -> dict[int, Path]:
        """Return the folders of weights by step, without the second ones of an EMA (step-000100-raw)."""
        return _by_step(self.path.glob(f"{kind}/step-*"))

    def lora_files(self) -> dict[str, Path]:
        """Return the LoRA files in `last`, `best` and, of the newest export, `export`; without links."""
        found = {}
        for place in ("*/last", "*/best", "export"):
            for path in sorted(self.path.glob(f"{place}/[!.]*.safetensors"), key=lambda path: path.lstat().st_mtime):
                if link_below(self.path, path) is None and "-of-" not in path.name:  # a transformer's
                    found[path.parent.name] = path
        return found

    def controls(self) -> list[Path]:
        """Return the condition images of the first sample, which commands name."""
        return sorted(self.samples.glob("control*.png"), key=lambda path: (len(path.name), path.name))

    def samples_of(self, step: int) -> Path:
        """Return the folder of the sample images of one step."""
        return self.samples / f"step-{step:06d}"

    def sampled_steps(self) -> dict[int, Path]:
        """Return the folders of sample images by step."""
        return _by_step(self.samples.glob("step-*"))

    def ask(self, name: str) -> None:
        """Request one of `REQUESTS` from the running run; raises FileNotFoundError if it does not train."""
        request = self.requests / REQUESTS[REQUESTS.index(name)]
        if link := link_below(self.path, request):
            raise FileNotFoundError(f"{link} is a link")
        request.touch()

    def close_requests(self) -> None:
        """Remove all requests, and their folder unless it contains other files."""
        with suppress(OSError):
            for name in REQUESTS if link_below(self.path, self.requests) is None else ():
                (self.requests / name).unlink(missing_ok=True)
            self.requests.rmdir()

    def files(self) -> dict[str, list[int]]:
        """Return the size and time of each file by its path, without requests, links, hidden or unprintable names."""
        found = {}
        for path in (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names):
            name = path.relative_to(self.path).as_posix()
            shown = name.isprintable() and "/." not in f"/{name}" and path.parent != self.requests
            if shown and path.is_file() and link_below(self.path, path) is None:
                with suppress(FileNotFoundError):  # removed since
                    facts = path.stat()
                    found[name] = [facts.st_size, facts.st_mtime_ns]
        return found

    def write_end(self, end: End) -> None:
        with replacing(self.finished) as temporary:
            temporary.write_text(json.dumps(end._asdict()) + "\n", encoding="utf-8")

    def read_end(self, max_steps: int, early_stopping: bool) -> End | None:
        """Return the end of a run that has reached max_steps or, with early_stopping, was stopped early; else None."""
        if not self.finished.is_file():
            return None
        with reading(self.finished, "delete it"):
            end = End(**json.loads(read_bytes(self.finished)))
            return end if end.step >= max_steps or (early_stopping and end.stopped_early) else None

    def remove_leftovers(self) -> None:
        """Remove the output of a run that saved nothing."""
        for path in self.leftovers():
            if path.is_dir() and link_below(self.path, path) is None:
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def leftovers(self) -> list[Path]:
        """Return the possible output of a run that saved nothing: all but weights and checkpoints, config.yaml last."""
        logs = [self.path / name for name in ("tensorboard", "csv", "wandb", "fit-profile.txt")]
        tables = [self.metrics, self.validation, self.finished]
        return [*logs, *tables, self.samples, self.active_ranks, self.grid, self.report, self.config]


def _by_step(paths: Iterable[Path]) -> dict[int, Path]:
    """Return the paths that are named by a step, in the order of the steps."""
    steps = {path.stem.removeprefix("step-"): path for path in paths}
    return dict(sorted((int(step), path) for step, path in steps.items() if step.isdecimal()))
