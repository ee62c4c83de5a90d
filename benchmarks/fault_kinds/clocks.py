"""A machine's clock that jumps, and files of the future and of the past."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from benchmarks.fault_kinds import hooks
from benchmarks.fault_kinds.judging import BadError
from benchmarks.fault_kinds.rounds import Round
from benchmarks.fault_kinds.workshop import PAIRS

HOURS = 30.0


def clock_build(round: Round) -> None:
    """Two builders whose clocks jump by hours, one of which may be killed; files get times of other days."""
    counted = round.folder / "encoded"
    also = [partial(hooks.count_encodings, str(counted))]
    names = [round.shop.build() for _ in range(2)]
    clocks = [partial(hooks.jump_clock, round.random.randrange(10**6), HOURS) for _ in names]
    dies = round.random.random() < 0.5
    moment = round.moment("build")
    other = round.start("predict", *names[1], also=[*also, clocks[1]])
    if dies:
        round.ended(
            round.strike(moment, signal.SIGKILL, "predict", *names[0], also=[*also, clocks[0]]), (0, -signal.SIGKILL)
        )
    else:
        round.words.append("two builders")
        round.ended(round.start("predict", *names[0], also=[*also, clocks[0]]))
    round.ended(other)
    change_times(round, round.folder / "cache")
    round.run("predict", *names[0], also=[*also, clocks[0]])
    round.same_cache()
    if counted.stat().st_size > PAIRS + dies:
        raise BadError(f"{counted.stat().st_size} samples were encoded, of {PAIRS}: some were encoded twice")


def clock_train(round: Round) -> None:
    """A run that is killed while its clock jumps by hours, and whose files get times of other days."""
    round.take_cache()
    clock = partial(hooks.jump_clock, round.random.randrange(10**6), HOURS)
    round.kill(round.moment("train"), "train", *round.shop.train(), also=[clock])
    saved = round.saved() if (round.folder / "run").exists() else []
    for name in ("run", "cache"):
        change_times(round, round.folder / name)
    round.run("train", *round.shop.train(), also=[clock])
    round.same_run("train")
    round.kept(saved)


def change_times(round: Round, folder: Path) -> None:
    """Give each file, by chance, a time up to a year before or behind now."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and round.random.random() < 0.7:
            at = time.time() + round.random.uniform(-1, 1) * 365 * 86400
            os.utime(path, (at, at))
