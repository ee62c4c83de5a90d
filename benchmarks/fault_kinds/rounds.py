"""A round: a folder, the commands that run in it, and how they may end."""

import shutil
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from benchmarks.fault_kinds import hooks
from benchmarks.fault_kinds.commands import Command, Hook
from benchmarks.fault_kinds.judging import (
    BadError,
    cache_differences,
    cache_folder,
    checkpoint_step,
    rows,
    run_differences,
)
from benchmarks.fault_kinds.workshop import FILES, Reference, Workshop

# Seconds after which a command hangs.
LIMIT = 150.0
NORMAL = (0,)
OR_A_LINE = (0, 1)


class Moment(NamedTuple):
    """A moment to act on a command: before one of its changes of files, or after so many seconds.

    Attributes:
        pattern: regular expression for the paths whose changes are counted.
    """

    change: int | None
    pattern: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"after {self.seconds:.2f} s" if self.change is None else f"before change {self.change} of {self.pattern}"
        )


class Round:
    """A fault, injected once.

    Args:
        name: name of the fault.
        seed: all that is drawn is a function of it.
        folder: which it has to itself.

    Attributes:
        words: what was done, for who repeats it.
        lines: the error lines that its commands have ended with.
        hit: whether the fault met a command while it ran.
    """

    def __init__(self, name: str, seed: int, folder: Path, shop: Workshop) -> None:
        self.name = name
        self.seed = seed
        self.folder = folder
        self.shop = shop
        self.random = Random(f"{name} {seed}")
        self.words: list[str] = []
        self.lines: list[str] = []
        self.hit = True
        self.commands: list[Command] = []
        folder.mkdir(parents=True)

    def start(self, script: str, *overrides: str, also: Sequence[Hook] = ()) -> Command:
        """Start a command in the round's folder."""
        log = self.folder / f"log-{len(self.commands)}.txt"
        command = Command(script, overrides, self.folder, log, [hooks.be_quick, *also])
        self.commands.append(command)
        return command

    def ended(self, command: Command, allowed: Sequence[int] = NORMAL) -> str:
        """Return the output of a command once it has ended.

        Raises:
            BadError: it hangs, has another status, or tells of an error in other than one line.
        """
        status = command.wait(LIMIT)
        text = command.text
        if status is None:
            raise BadError(f"{command.log.name}: not ended after {LIMIT:g} s")
        if "Traceback (most recent call last)" in text:
            raise BadError(f"{command.log.name}: a traceback")
        if status not in allowed:
            raise BadError(f"{command.log.name}: status {status}: {text.strip()[-300:]}")
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        if status == 1:
            if len(errors) != 1:
                raise BadError(f"{command.log.name}: {len(errors)} lines of an error")
            self.lines += errors
        return text

    def run(self, script: str, *overrides: str, also: Sequence[Hook] = (), allowed: Sequence[int] = NORMAL) -> str:
        """Run a command to its end."""
        return self.ended(self.start(script, *overrides, also=also), allowed)

    def moment(self, kind: str, pattern: str = FILES, timed: bool = True) -> Moment:
        """Choose a moment of the reference of this kind.

        Args:
            timed: half of them by time.
        """
        reference: Reference = self.shop.reference(kind)
        if timed and self.random.random() < 0.4:
            return Moment(None, pattern, self.random.uniform(0.05, 1.0) * reference.seconds)
        return Moment(self.random.randint(1, max(1, reference.count(pattern))), pattern, 0.0)

    def strike(
        self, moment: Moment, number: signal.Signals, script: str, *overrides: str, also: Sequence[Hook] = ()
    ) -> Command:
        """Start a command that gets a signal at this moment; it still runs if the signal does not end it."""
        self.words.append(f"{number.name} {moment}")
        if moment.change is not None:
            at = partial(hooks.signal_at, moment.pattern, moment.change, number)
            return self.start(script, *overrides, also=[*also, at])
        command = self.start(script, *overrides, also=also)
        time.sleep(moment.seconds)
        self.hit = command.send(number)
        return command

    def kill(self, moment: Moment, script: str, *overrides: str, also: Sequence[Hook] = ()) -> None:
        """Run a command that is killed at this moment, unless it ends before."""
        command = self.strike(moment, signal.SIGKILL, script, *overrides, also=also)
        self.ended(command, (0, -signal.SIGKILL))
        self.hit = command.status != 0

    def same_cache(self, cache_dir: Path | None = None) -> None:
        """Raise a BadError unless the cache is that of the reference."""
        self._same(cache_differences(self.shop.reference("build").folder / "cache", cache_dir or self.folder / "cache"))

    def same_run(self, kind: str, run: Path | None = None) -> None:
        """Raise a BadError unless the run is that of the reference of this kind."""
        self._same(run_differences(self.shop.reference(kind).folder / "run", run or self.folder / "run"))

    def _same(self, differences: list[str]) -> None:
        if differences:
            raise BadError("; ".join(differences))

    def saved(self, run: Path | None = None) -> list[dict[str, str]]:
        """Return the rows of the steps that a run has saved, which resuming must not repeat."""
        run = run or self.folder / "run"
        step = checkpoint_step(run / "checkpoints" / "last.ckpt")
        return [] if step is None else [row for row in rows(run / "metrics.csv") if int(row["step"]) <= step]

    def kept(self, saved: list[dict[str, str]], run: Path | None = None) -> None:
        """Raise a BadError where a step that was saved was made again: its times differ then."""
        if saved and rows((run or self.folder / "run") / "metrics.csv")[: len(saved)] != saved:
            raise BadError(f"the {len(saved)} steps that were saved were made again")

    def take_cache(self) -> Path:
        """Copy the reference's cache into the round's folder, and return it within the cache_dir."""
        shutil.copytree(self.shop.reference("build").folder / "cache", self.folder / "cache")
        return cache_folder(self.folder / "cache")

    def end(self) -> None:
        """End all commands of the round."""
        for command in self.commands:
            command.end()
