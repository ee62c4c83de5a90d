"""The folder of a run: every path below its output_dir, and writing files that may be missing."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from datamodules.files import reason, remove_temporary

log = logging.getLogger("retouch")


def shorten(folder: str | Path) -> Path:
    """A path relative to the working directory where it is below it, as messages show it."""
    path = Path(folder)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Turn any error inside into a note that `what` is missing; HYDRA_FULL_ERROR=1 adds the traceback."""
    try:
        yield
    except Exception as error:
        line = reason(error)
        log.warning(f"note: no {what}: {line}", exc_info=os.environ.get("HYDRA_FULL_ERROR") == "1")


class RunFolder:
    """The paths of a run.

    Args:
        path: its output_dir.

    Attributes:
        config: its settings; this file marks a folder as a run's.
        checkpoint: what a run is resumed from.
        finished: how the run ended: its last step, and what a sweep compares.
        samples: a folder for each step at which sample pictures were made.
        control: the first condition image of the first of them, which commands name.
        metrics: a row for each optimizer step.
        validation: a row for each set of sample pictures.
        grid: control, before, after and target.
        active_ranks: a T-LoRA's ranks.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.checkpoint = self.path / "checkpoints" / "last.ckpt"
        self.finished = self.path / "finished.json"
        self.samples = self.path / "samples"
        self.control = self.samples / "control.png"
        self.metrics = self.path / "metrics.csv"
        self.validation = self.path / "validation.csv"
        self.report = self.path / "report.html"
        self.grid = self.path / "grid.png"
        self.active_ranks = self.path / "active_ranks.png"

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunFolder":
        """The run that wrote this file."""
        return cls(checkpoint.parent.parent)

    def __str__(self) -> str:
        return str(self.path)

    def relative(self, path: Path) -> str:
        """The name of a file within the run."""
        return str(path.relative_to(self.path))

    def checkpoint_of(self, step: int) -> Path:
        """Where the checkpoint of a step is kept once there is a newer one."""
        return self.checkpoint.with_name(f"step-{step:06d}.ckpt")

    def kept_checkpoints(self) -> dict[int, Path]:
        """Those of `checkpoint_of`, by step."""
        return _by_step(self.checkpoint.parent.glob("step-*.ckpt"))

    def checkpoints(self) -> list[Path]:
        """All that there are, the newest first."""
        last = [self.checkpoint] if self.checkpoint.is_file() else []
        return [*last, *reversed(self.kept_checkpoints().values())]

    def unfinished_checkpoints(self) -> list[Path]:
        """What a run leaves that is killed while it saves."""
        return list(self.checkpoint.parent.glob(f".{self.checkpoint.name}.*.tmp"))

    @property
    def unfinished_checkpoint(self) -> Path:
        """One of them, for a saving that was not killed but has failed."""
        return self.checkpoint.with_name(f".{self.checkpoint.name}.failed.tmp")

    def remove_unfinished(self) -> None:
        """Remove the temporary files and folders that a killed run leaves; not those of this process."""
        left = [*self.path.glob(".*.tmp"), *self.path.glob("*/.*.tmp"), *self.path.glob("*/*/.*.tmp")]
        remove_temporary(left, is_writing=os.getpid().__eq__)

    def weights(self, kind: str, name: str) -> Path:
        """A folder of weights: step-000100, last or best, below the adapter's `folder`."""
        return self.path / kind / name

    def saved_weights(self) -> Path | None:
        """`last`, or without it the newest folder of weights that has files in it."""
        named = [folder for name in ("last", "best", "step-*") for folder in self.path.glob(f"*/{name}")]
        named = [folder for folder in named if folder.name in ("last", "best") or _step(folder) is not None]
        folders = [folder for folder in named if folder.parent != self.samples and any(folder.glob("[!.]*"))]
        return max(folders, key=lambda folder: (folder.name == "last", folder.stat().st_mtime), default=None)

    def saved_steps(self, kind: str) -> dict[int, Path]:
        """The folders of weights that are named by their step, without the others of an EMA (step-000100-raw)."""
        return _by_step(self.path.glob(f"{kind}/step-*"))

    def samples_of(self, step: int) -> Path:
        """The sample pictures of one step."""
        return self.samples / f"step-{step:06d}"

    def sampled_steps(self) -> dict[int, Path]:
        """The folders of `samples_of`, by step."""
        return _by_step(self.samples.glob("step-*"))

    def files(self) -> dict[str, list[int]]:
        """Return the size and time of each file by its path in the folder, without hidden and unprintable names."""
        found = {}
        for path in (Path(folder, name) for folder, _, names in os.walk(self.path) for name in names):
            name = str(path.relative_to(self.path))
            if name.isprintable() and "/." not in f"/{name}" and path.is_file():
                with suppress(FileNotFoundError):  # removed since
                    facts = path.stat()
                    found[name] = [facts.st_size, facts.st_mtime_ns]
        return found

    def leftovers(self) -> list[Path]:
        """What a run may leave that saved nothing: all but weights and checkpoints. config.yaml comes last."""
        logs = [self.path / name for name in ("tensorboard", "csv", "wandb", "fit-profile.txt")]
        tables = [self.metrics, self.validation, self.finished]
        pictures = [self.samples, self.active_ranks, self.grid, self.report]
        return [*logs, *tables, *pictures, self.config]


def _by_step(paths: Iterable[Path]) -> dict[int, Path]:
    """Those that are named by a step and nothing else, in their order."""
    return dict(sorted((step, path) for path in paths if (step := _step(path)) is not None))


def _step(path: Path) -> int | None:
    step = path.stem.removeprefix("step-")
    return int(step) if step.isdecimal() else None
