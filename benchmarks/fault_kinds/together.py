"""Two commands at once: on one cache, and on one folder."""

import time

from benchmarks.fault_kinds.judging import BadError
from benchmarks.fault_kinds.rounds import LIMIT, OR_A_LINE, Round


def two_runs_one_cache(round: Round) -> None:
    """Two runs that fill one cache while each needs it; both end as one that is alone."""
    names = ("run", "run-2")
    commands = []
    for name in names:
        commands.append(round.start("train", *round.shop.train(output_dir=name)))
        time.sleep(round.random.choice([0, round.random.uniform(0, 2)]))
    for command in commands:
        round.ended(command)
    for name in names:
        round.same_run("train", round.folder / name)
    round.same_cache()


def two_runs_one_folder(round: Round) -> None:
    """The second of two runs in one folder is refused in a line, and the first is as if it had been alone."""
    round.take_cache()
    first = round.start("train", *round.shop.train())
    end = time.monotonic() + LIMIT
    while not (round.folder / "run" / ".lock").exists() and first.status is None and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(round.random.uniform(0, 1.5))
    round.words.append(f"the first has ended: {first.status is not None}")
    second = round.start("train", *round.shop.train())
    text = round.ended(second, OR_A_LINE)
    round.ended(first)
    if not ("is in use by another command" in text if second.status else "nothing to do" in text):
        raise BadError(f"the second run: {text[-300:]}")
    round.same_run("train")
