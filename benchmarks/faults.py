"""Faults, done at random moments to real processes of train.py and predict.py, and what comes of them.

    python benchmarks/faults.py --rounds 100 --seed 7            # each fault in turn; a round takes about ten seconds
    python benchmarks/faults.py --rounds 1 --seed 42 --only stop # the round of `stop` with seed 42 again

Each round goes on by the same command, and is then one of these:

    same bits   the end is to the bit that of a run that nothing has disturbed, and nothing was lost that was saved
    one line    a command ended with status 1 and one line of an error, and after what that says it is the same bits
    BAD         anything else: printed with the command that repeats it; its folder is kept, and the exit status is 1

A round is a function of its fault and its seed. Moments are counted by what a command changes on the disk, so that they
come again, or by the clock, where a repeated round is only alike.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":  # the processes that it starts find what it imports
    sys.path[0] = str(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from benchmarks.fault_kinds import damages, disks, stops, streams  # noqa: E402
from benchmarks.fault_kinds.judging import BadError  # noqa: E402
from benchmarks.fault_kinds.rounds import Round  # noqa: E402
from benchmarks.fault_kinds.workshop import KINDS, Workshop  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
SAME, LINE, BAD = "same bits", "one line", "BAD"
FAULTS: dict[str, Callable[[Round], None]] = {
    one.__name__: one
    for one in (
        *(stops.kill_build, stops.kill_merge, stops.kill_train, stops.kill_first_saving, stops.kill_export),
        *(stops.kill_one_of_two, stops.stop),
        *(disks.full_disk, damages.damaged_cache, damages.damaged_copy, damages.damaged_build),
        *(damages.damaged_checkpoint, damages.damaged_lora, damages.damaged_end),
        *(streams.streamed, streams.store_away),
    )
}


class Result(NamedTuple):
    """A round's end.

    Attributes:
        words: what was done.
        why: the fault of a BAD round; the printed line of a refused one.
        hit: whether the fault met a running command.
    """

    fault: str
    seed: int
    outcome: str
    words: str
    why: str
    hit: bool
    seconds: float


def play(fault: str, seed: int, shop: Workshop) -> Result:
    """Run and judge a round."""
    folder = shop.folder / "rounds" / f"{fault}-{seed}"
    if folder.exists():
        shutil.rmtree(folder)
    started = time.monotonic()
    round = Round(fault, seed, folder, shop)
    outcome, why = SAME, ""
    try:
        FAULTS[fault](round)
        if round.lines:
            outcome, why = LINE, round.lines[0]
    except BadError as error:
        outcome, why = BAD, str(error)
    except Exception:  # what a round stumbles over is not what it should find
        outcome, why = BAD, traceback.format_exc()
    finally:
        round.end()
    if outcome != BAD:
        shutil.rmtree(folder, ignore_errors=True)
    why = why.replace(str(shop.folder), "FOLDER")
    return Result(fault, seed, outcome, ", ".join(round.words), why, round.hit, time.monotonic() - started)


def tell(result: Result, folder: Path) -> None:
    """Return the line of a round, and for a BAD one the command that repeats it."""
    print(f"{result.outcome:9} {result.fault} {result.seed}  {result.seconds:.0f} s  {result.words}", flush=True)
    if result.outcome == BAD:
        place = folder / "rounds" / f"{result.fault}-{result.seed}"
        again = f"python benchmarks/faults.py --only {result.fault} --rounds 1 --seed {result.seed}"
        print(f"    {result.why}\n    its folder: {place}\n    repeat it: {again}", flush=True)


def table(results: Sequence[Result]) -> str:
    """Return the table of faults and outcomes in benchmarks/README.md."""
    lines = ["| fault | what is done | rounds | same bits | one line | BAD |", "|---|---|---|---|---|---|"]
    for name in [*FAULTS, "all"]:
        mine = [one.outcome for one in results if name in (one.fault, "all")]
        if mine:
            what = (FAULTS[name].__doc__ or "").strip() if name in FAULTS else ""
            counts = " | ".join(str(mine.count(kind)) for kind in (SAME, LINE, BAD))
            lines.append(f"| {name} | {what} | {len(mine)} | {counts} |")
    return "\n".join(lines)


def campaign(shop: Workshop, faults: Sequence[str], rounds: int, seed: int, jobs: int, minutes: float) -> list[Result]:
    """Run all rounds, with seed + n the n-th fault in turn."""
    end = time.monotonic() + 60 * minutes

    def one(number: int) -> Result | None:
        if time.monotonic() > end:
            return None
        result = play(faults[number % len(faults)], seed + number, shop)
        tell(result, shop.folder)
        return result

    for kind in KINDS:
        shop.reference(kind)
    with ThreadPoolExecutor(jobs) as pool:
        return [result for result in pool.map(one, range(rounds)) if result is not None]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=len(FAULTS))
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each further one has the next")
    parser.add_argument(
        "--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS)
    )
    parser.add_argument("--jobs", type=int, default=2, help="rounds at once")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no further round begins")
    parser.add_argument("--folder", type=Path, help="where all is written; a new temporary one where left out")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help="write the results as JSON")
    options = parser.parse_args()
    folder: Path = (options.folder or Path(tempfile.mkdtemp(prefix="faults-"))).absolute()
    shop = Workshop(folder)
    started = time.monotonic()
    results = campaign(shop, options.only, options.rounds, options.seed, options.jobs, options.minutes)
    seconds = time.monotonic() - started
    print(table(results))
    bad = [one for one in results if one.outcome == BAD]
    if options.write is not None:
        facts: dict[str, Any] = {"seed": options.seed, "rounds": len(results), "minutes": round(seconds / 60, 1)}
        facts |= {"cores": os.cpu_count(), "python": platform.python_version()}
        lines = [json.dumps(one._asdict() | {"seconds": round(one.seconds, 1)}) for one in results]
        head = json.dumps(facts)[1:-1]
        options.write.write_text("{" + head + ',\n"results": [\n' + ",\n".join(lines) + "\n]}\n")
    if options.folder is None and not bad:
        shutil.rmtree(folder)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
