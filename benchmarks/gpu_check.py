"""Check training on this GPU and measure its speed: eleven checks, then a table, in ten minutes.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --only scaled_mm bases "speed flux_kontext fp8"
    python benchmarks/gpu_check.py --tiny                  # tiny models; on a CPU too, without what only a GPU can

After each part the results are written to benchmarks/results/gpu_check.json and .md, and what libraries print to .log.
Parts run in a process of their own: when one fails, the next ones have a new process; when one does not end, it is
killed. Needs torch, diffusers, peft, bitsandbytes, optimum-quanto, lightning, hydra-core, obstore and rapidfuzz with
what they need. Exits with 1 where something failed.
"""

import argparse
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the packages beside this folder, installed or not

from benchmarks.gpu import results, worker  # noqa: E402
from benchmarks.gpu.parts import PARTS, Part, chosen  # noqa: E402

# Seconds for a process to import its libraries.
START = 120


class Gone(Exception):
    """The process did not answer in time, or is no more."""


def logged(log: Path, run: Callable[..., None], *arguments: Any) -> None:
    """Run with all that is printed at the end of a file."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run(*arguments)


class Child:
    """A process that runs parts; nothing of CUDA is in the one that starts it.

    Attributes:
        head: what it runs on.
    """

    def __init__(self, tiny: bool, device: str | None, folder: Path, log: Path) -> None:
        context = multiprocessing.get_context("fork")  # of a process that has imported nothing: as good as a new one
        self._connection, theirs = context.Pipe()
        arguments = theirs, self._connection, tiny, device, folder
        self._process = context.Process(target=logged, args=(log, worker.work, *arguments))
        self._process.start()
        theirs.close()
        self.head = self._answer(START)

    def run(self, name: str, part: Part, seconds: float) -> dict[str, Any]:
        """Run a part, which has this many seconds, and return its result."""
        self._connection.send((name, part))
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise Gone(f"its process ended with status {self._process.exitcode}, see the log") from None
        self.end()
        raise Gone(f"not done after {seconds:.0f} s")

    def end(self) -> None:
        """Kill the process, which may wait for a GPU forever."""
        self._process.kill()
        self._process.join()


def check(parts: dict[str, Part], options: argparse.Namespace, folder: Path) -> dict[str, results.Record]:
    """Run the parts in order and write what comes of each.

    Raises:
        SystemExit: there is no GPU for what is not tiny.
    """
    deadline = time.monotonic() + 60 * options.minutes
    options.output.parent.mkdir(parents=True, exist_ok=True)
    log = options.output.with_suffix(".log")
    log.write_text("")
    command = shlex.join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]])
    head: dict[str, Any] = {"command": command, "device": None, "cuda": None, "versions": {}}
    records: dict[str, results.Record] = {}
    child: Child | None = None
    for name, part in parts.items():
        began = time.monotonic()
        record: results.Record = {"status": "skipped", "wrong": [], "facts": {}}
        try:
            if deadline - began >= part.needs:
                if child is None:
                    child = Child(options.tiny, options.device, folder, log)
                    head |= child.head
                    if head["device"] == "cpu" and not options.tiny:
                        raise SystemExit("error: there is no GPU: add --tiny, for models that a CPU can run")
                record |= child.run(name, part, max(1, min(part.limit, deadline - time.monotonic())))
        except Gone as gone:
            record |= {"status": "failed", "wrong": [str(gone)]}
        except BaseException:
            if child is not None:
                child.end()
            raise
        if record["status"] == "failed" and child is not None:
            child.end()
            child = None
        record["seconds"] = round(time.monotonic() - began, 1)
        if part.row is not None:
            record["row"] = name.removeprefix("speed ")
        records[name] = record
        results.write(options.output, head, records)
        print("  ".join([f"{record['status']:7} {record['seconds']:6.1f} s  {name}", *record["wrong"]]), flush=True)
    if child is not None:
        child.end()
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="tiny models and pictures")
    parser.add_argument("--minutes", type=float, default=9, help="what does not fit into them is skipped")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; a GPU where there is one")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    options = parser.parse_args()
    parts = chosen(options.only, options.tiny)
    if not parts:
        parser.error(f"--only {' '.join(options.only)}: choose {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        records = check(parts, options, Path(folder))
    skipped = [name for name, record in records.items() if record["status"] == "skipped"]
    if skipped:
        print(f"skipped, for {options.minutes:g} minutes are over: {', '.join(skipped)}")
    failed = results.failures(records)
    print("\n".join(["failed:", *failed] if failed else ["nothing failed"]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
