"""Check training on this GPU and measure its speed: attention, a table of speeds, more checks, in ten minutes.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --minutes 40            # all of it
    python benchmarks/gpu_check.py --only scaled_mm bases "speed flux_kontext fp8"
    python benchmarks/gpu_check.py --tiny                  # tiny models; on a CPU too, without what only a GPU can

After each part the results are written to benchmarks/results/gpu_check.json and .md, and what libraries print to .log.
Parts run in one process, and another computes what needs no GPU; if a part ends its process or does not end, the next
ones have a new one. Needs torch, diffusers, peft, bitsandbytes, optimum-quanto, lightning, hydra-core, obstore and
rapidfuzz with what they need. Exits with 1 where something failed.
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

from benchmarks.gpu import goals, results, worker  # noqa: E402
from benchmarks.gpu.parts import PARTS, Part, chosen  # noqa: E402

# Seconds for a process to import its libraries from a cold disk; and at the end, to wait for what needs no GPU.
START, PATIENCE = 300, 60


class Gone(Exception):
    """The process did not answer in time, or is no more."""


def logged(log: Path, run: Callable[..., None], *arguments: Any) -> None:
    """Run with all that is printed at the end of a file."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run(*arguments)


class Child:
    """A process; nothing of CUDA is in the one that starts it.

    Args:
        run: its function, of both ends of a connection and the other arguments.
        log: for its output.
    """

    def __init__(self, log: Path, run: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")  # of a process that has imported nothing: as good as a new one
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=logged, args=(log, run, theirs, self.connection, *arguments))
        self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> Any:
        """Return what the process sends; raise Gone if it sends nothing in time."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise Gone(f"its process ended with status {self._process.exitcode}, see the log") from None
        self.end()
        raise Gone(f"not done after {seconds:.0f} s")

    def run(self, name: str, part: Part, seconds: float) -> dict[str, Any]:
        """Run a part, which has this many seconds, and return its result."""
        self.connection.send((name, part))
        return self.answer(seconds)

    def end(self) -> None:
        """Kill the process, which may wait for a GPU forever."""
        self._process.kill()
        self._process.join()


class Check:
    """A run of the parts, in order.

    Args:
        folder: for files of the processes.

    Attributes:
        records: the results by part.
    """

    def __init__(self, parts: dict[str, Part], options: argparse.Namespace, folder: Path) -> None:
        self.parts, self.options, self.folder = parts, options, folder
        self.deadline = time.monotonic() + 60 * options.minutes
        self.log = options.output.with_suffix(".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        command = shlex.join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]])
        self.head: dict[str, Any] = {"command": command, "tiny": options.tiny}
        self.head |= {"device": None, "cuda": None, "versions": {}}
        self.records: dict[str, results.Record] = {}
        self._worker: Child | None = None
        self._planner: Child | None = None
        self._is_planned = False
        self._plans: dict[str, results.Facts] = {}

    def run(self) -> None:
        """Run the parts and write the results after each.

        Raises:
            SystemExit: there is no GPU for what is not tiny.
        """
        try:
            for name, part in self.parts.items():
                self._add(name, part)
            rows = [name for name, record in self.records.items() if "row" in record]
            until = time.monotonic() + PATIENCE
            while self._planner is not None and not self._plans.keys() >= {*rows} and time.monotonic() < until:
                self._take_plans(1)
            self.write()
        finally:
            for child in (self._worker, self._planner):
                if child is not None:
                    child.end()

    def write(self) -> None:
        """Write the results, with what the rows needed no GPU for."""
        for name, record in self.records.items():
            results.complete(record, self._plans.get(name, {}))
        results.write(self.options.output, self.head, self.records)

    def _add(self, name: str, part: Part) -> None:
        """Run a part, if there is time for it, and add its result."""
        began = time.monotonic()
        record: results.Record = {"status": "skipped", "wrong": [], "facts": {}}
        if part.row is not None:
            record["row"] = name.removeprefix("speed ")
        if self.deadline - began >= part.needs:
            record |= self._result(name, part)
        record["seconds"] = round(time.monotonic() - began, 1)
        self.records[name] = record
        self._take_plans(0)
        self.write()
        print("  ".join([f"{record['status']:7} {record['seconds']:6.1f} s  {name}", *record["wrong"]]), flush=True)

    def _result(self, name: str, part: Part) -> results.Record:
        try:
            if self._worker is None:
                self._worker = Child(self.log, worker.work, self.options.tiny, self.options.device, self.folder)
                self.head |= self._worker.answer(START)
                if self.head["device"] == "cpu" and not self.options.tiny:
                    raise SystemExit("error: there is no GPU: add --tiny, for models that a CPU can run")
                self._start_planner()
            record = self._worker.run(name, part, max(1, min(part.limit, self.deadline - time.monotonic())))
        except Gone as gone:
            record = {"status": "failed", "wrong": [str(gone)], "facts": {}, "ends": True}
        if record.pop("ends", False) and self._worker is not None:
            self._worker.end()
            self._worker = None
        if part.may_end and record["status"] == "failed":
            record |= {"status": "noted", "facts": record["facts"] | {"ended": record["wrong"][0]}, "wrong": []}
        return record

    def _start_planner(self) -> None:
        """Start the process for what needs no GPU, if there is a table; the first one has read the libraries' files."""
        rows = {name: part.row for name, part in self.parts.items() if part.row is not None}
        if rows and not self._is_planned:
            self._is_planned = True
            folder = self.folder / "plans"
            folder.mkdir()
            self._planner = Child(self.log, worker.plan, self.options.tiny, folder, rows)

    def _take_plans(self, seconds: float) -> None:
        """Take what has come of the rows, or comes in this time."""
        try:
            while self._planner is not None and self._planner.connection.poll(seconds):
                name, facts = self._planner.connection.recv()
                self._plans[name] = facts
        except (EOFError, OSError):  # it is done
            self._planner = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="tiny models and images")
    parser.add_argument("--minutes", type=float, default=9, help="what does not fit into them is skipped")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; a GPU where there is one")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_check.json")
    options = parser.parse_args()
    parts = chosen(options.only, options.tiny)
    if not parts:
        parser.error(f"--only {' '.join(options.only)}: choose {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        check = Check(parts, options, Path(folder))
        check.run()
    skipped = [name for name, record in check.records.items() if record["status"] == "skipped"]
    if skipped:
        print(f"skipped, for {options.minutes:g} minutes are over: {', '.join(skipped)}")
    if reached := goals.lines(check.head, check.records):
        print("\n".join(["goals:", *reached]))
    failed = results.failures(check.records)
    print("\n".join(["failed:", *failed] if failed else ["nothing failed"]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
