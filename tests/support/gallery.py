"""Runs on which many tests assert, each built once for all workers of pytest."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning.pytorch.utilities.seed import isolate_rng

from tests.support.commands import run_here, short
from tests.support.other_adapters import OTHERS, short_of


def shared_folder(tmp_path_factory) -> Path:
    """Return the folder that all workers of this session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return a folder, built by the first worker that needs it; others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = Path(f"{folder}.done")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            with isolate_rng():
                build(folder)
            done.touch()
    return folder


class Folders(dict[str, Path]):
    """Folders by name, each built when it is first needed."""

    def __init__(self, root: Path, names: list[str], build: Callable[[str, Path], None]) -> None:
        super().__init__()
        self.root, self.names, self.build = root, names, build

    def __missing__(self, name: str) -> Path:
        assert name in self.names
        self[name] = once(self.root / name, partial(self.build, name))
        return self[name]


@dataclass(frozen=True)
class Past:
    """A run that has ended well: its folder, which tests only read, and what it printed."""

    folder: Path
    text: str


class Runs:
    """Runs by their settings, on the tiny FLUX Kontext and eight pairs."""

    def __init__(self, root: Path, tiny: Path, pairs: Path) -> None:
        self.root, self.tiny, self.pairs = root, tiny, pairs

    def __call__(self, steps: int, *overrides: str, data: str = "cached", shown: bool = False) -> Past:
        """Return the run of `short` with these settings."""
        name = hashlib.sha256(repr((steps, overrides, data, shown)).encode()).hexdigest()[:12]
        output, text = self.root / name / "run", self.root / name / "text"

        def build(folder: Path) -> None:
            folder.mkdir()
            common = short(self.tiny, self.pairs, output, steps, data, shown)
            if {"adapter=full", "adapter.full_matrix=true"} & {*overrides}:  # which have no rank
                common = short_of(common)
            outcome = run_here("train", *common, *overrides)
            assert outcome.status == 0, outcome.text
            text.write_text(outcome.text)

        once(self.root / name, build)
        return Past(output, text.read_text())


# Its samples are those of two held-out pairs, its checkpoints at steps 2 and 4.
SHOWN = (
    "callbacks.sample_images.count=2",
    "model.sampling.num_inference_steps=2",
    "data.val_count=2",
    "sample_every=2",
    "save_every=2",
    "optimizer.lr=1e-2",
    "scheduler=constant",
)
# An update large enough to change images visibly; alpha differs from rank.
LEARNED = ("adapter.alpha=8", "optimizer.lr=3e-2", "scheduler=constant")
# Of the kinds of `other_adapters`; two held-out pairs are sampled.
OTHERS_LEARNED = ("optimizer.lr=2e-2", "scheduler=constant", "model.dtype=float32", "data.val_count=2")


class Gallery:
    """Runs by name."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def __call__(self, name: str) -> Past:
        """Return a run: plain, shown, or by adapter one that visibly changes images, with alpha unlike the rank."""
        if name == "plain":
            return self.runs(2)
        if name == "shown":
            return self.runs(4, *SHOWN, shown=True)
        if name in OTHERS:
            return self.runs(6, *OTHERS[name], *OTHERS_LEARNED, shown=True)
        return self.runs(8, f"adapter={name}", *LEARNED)
