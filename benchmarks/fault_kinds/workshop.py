"""Shared parts of all rounds: pairs, settings of commands, and undisturbed references."""

import re
import shutil
import time
from functools import partial
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from benchmarks.fault_kinds import hooks
from benchmarks.fault_kinds.commands import Command, Hook
from benchmarks.fault_kinds.judging import cache_folder
from benchmarks.photos.pairs import MAKE_IT_SUNSET, photographs

# Of references, in the order in which they need each other.
KINDS = ("build", "train", "shown", "copy", "export", "edit")
PAIRS = 24
# What a command changes, relative to where it runs, without what libraries write elsewhere.
FILES = r"^(run|cache|out|outputs)/"
QUICK = ["data.num_workers=0", "trainer.accelerator=cpu"]
# A run of 1 to 3 seconds: mixed sizes, dropped captions, four savings.
TRAIN = [
    *("model=embedded", "data.batch_size=2", "trainer.max_steps=8", "save_every=2", "keep_checkpoints=2"),
    *("data.caption_dropout_rate=0.3", "scheduler.num_warmup_steps=2", "adapter.rank=4", "logger=none"),
]
QUIET = ["callbacks.sample_images=null", "callbacks.report=null"]
SHOWN = [
    *("data.val_count=2", "sample_every=4", "callbacks.sample_images.count=2"),
    "model.sampling.num_inference_steps=1",
]


class Reference(NamedTuple):
    """A command that nothing has disturbed.

    Attributes:
        folder: where it ran.
        seconds: what it took.
        changes: the paths of its changes of files, in order.
    """

    folder: Path
    seconds: float
    changes: list[str]

    def count(self, pattern: str) -> int:
        """Count changes of matching paths."""
        return sum(re.search(pattern, path) is not None for path in self.changes)


class Workshop:
    """A folder with all of a campaign.

    Args:
        folder: made, and filled as it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pairs = folder / "pairs"
        self._references: dict[str, Reference] = {}
        self._lock = RLock()
        if not self.pairs.is_dir():
            write_pairs(self.pairs)

    def build(self) -> list[str]:
        """Return overrides of predict.py that build a cache of several shards."""
        return ["task=cache", "model=embedded", f"data.root={self.pairs}", "data.cache_dir=cache", *QUICK]

    def train(self, shown: bool = False, output_dir: str = "run", cache_dir: str = "cache") -> list[str]:
        """Return overrides of train.py for a short run that resumes with the same command."""
        where = [f"data.root={self.pairs}", f"data.cache_dir={cache_dir}", f"output_dir={output_dir}", "resume=auto"]
        return [*TRAIN, *QUICK, *where, *(SHOWN if shown else QUIET)]

    def on_shards(self, place: Path | str) -> list[str]:
        """Return overrides of train.py for a run on the cache in a folder or at a URL."""
        return [*TRAIN, *QUICK, *QUIET, f"data.shards={place}", "output_dir=run", "resume=auto"]

    def export(self, run: Path, output_dir: str = "out") -> list[str]:
        """Return overrides of predict.py that write a run's LoRA for another program."""
        return ["task=export", f"lora={run}", "format=kohya", f"output_dir={output_dir}", "overwrite=true"]

    def edit(self, lora: Path, output_dir: str = "out") -> list[str]:
        """Return overrides of predict.py that create an image."""
        picture = self.pairs / "control_images" / "00.png"
        told = [f"lora={lora}", f"image={picture}", f'prompt="{MAKE_IT_SUNSET}"', "num_inference_steps=2"]
        return [*told, f"output_dir={output_dir}", "trainer.accelerator=cpu"]

    def reference(self, kind: str) -> Reference:
        """Return the undisturbed command of one of `KINDS`; `shown` samples images and builds its cache."""
        with self._lock:
            if kind not in self._references:
                self._references[kind] = self._make(kind)
            return self._references[kind]

    def _make(self, kind: str) -> Reference:
        folder = self.folder / "references" / kind
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        script, overrides = self._command(kind, folder)
        note = partial(hooks.note_changes, FILES, str(folder / "changes.txt"))
        started = time.monotonic()
        used: list[Hook] = [hooks.be_quick, note]
        command = Command(script, overrides, folder, folder / "log.txt", used)
        if command.wait(300) != 0:
            raise RuntimeError(f"the undisturbed command fails: {command.line}\n{command.text[-2000:]}")
        return Reference(folder, time.monotonic() - started, (folder / "changes.txt").read_text().splitlines())

    def _command(self, kind: str, folder: Path) -> tuple[str, list[str]]:
        if kind == "build":
            return "predict", self.build()
        if kind in ("train", "copy"):
            shutil.copytree(self.reference("build").folder / "cache", folder / "cache")
        if kind == "copy":
            return "train", self.on_shards(cache_folder(folder / "cache"))
        if kind in ("train", "shown"):
            return "train", self.train(kind == "shown")
        run = self.reference("train").folder / "run"
        return "predict", self.export(run) if kind == "export" else self.edit(run)


def write_pairs(folder: Path) -> None:
    """Write pairs in two sizes, 64x64 and 64x48, with a few instructions."""
    for kind in ("training_images", "control_images"):
        (folder / kind).mkdir(parents=True)
    for number, (_, *images) in enumerate(islice(photographs("train"), PAIRS)):
        for kind, image in zip(("control_images", "training_images"), images, strict=True):
            image.resize((64, 64)).crop((0, 0, 64, 64 if number % 2 else 48)).save(folder / kind / f"{number:02d}.png")
        text = MAKE_IT_SUNSET if number % 3 else f"{MAKE_IT_SUNSET} on picture {number}"
        (folder / "training_images" / f"{number:02d}.txt").write_text(text)
