"""Dry runs: jobs with progress, whose results are kept by their settings."""

import hashlib
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extras.page.jobs import Jobs, require_no_link, user_of
from foundation.errors import UserError
from foundation.files import read_bytes
from foundation.locks import LOCK
from report.quoting import argument
from runs.config_file import MOST_BYTES
from runs.run_folder import RunFolder

# Estimates whose durations tell how long the next one takes.
RECENT = 20
# Seconds in which the lock may still be that of the page.
SECONDS_OF_A_START = 5


class Plans:
    """Dry runs, one at a time, each in a folder of its own: its lock is written at the start, its log until the end."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self.jobs, self.folder = jobs, folder
        self._waiting: dict[str, list[str]] = {}  # arguments by key
        self._running: subprocess.Popen[bytes] | None = None
        self._one_thread = threading.Lock()

    def start(self, arguments: Sequence[str], again: bool) -> str:
        """Start a dry run, or let it wait for others, unless its result is kept or on its way; return its key."""
        key = hashlib.sha256("\n".join(arguments).encode()).hexdigest()[:16]
        run = RunFolder(self.folder / key)
        with self._one_thread:
            if key not in self._waiting and user_of(run.path) is None and (again or "╰" not in _printed(run)):
                require_no_link(self.jobs.outputs, run.log)
                run.log.unlink(missing_ok=True)
                self._waiting[key] = [*arguments, argument("output_dir", str(run)), "task=dry_run"]
        self._start_next()
        return key

    def _start_next(self) -> None:
        with self._one_thread:
            if self._waiting and (self._running is None or self._running.poll() is not None):
                key = next(iter(self._waiting))
                self._running = self.jobs.start(self._waiting.pop(key), RunFolder(self.folder / key))

    def state(self, key: str) -> dict[str, Any]:
        """Return a dry run's rows and notes, or its mistake; of a running one, its last line and its seconds."""
        self._start_next()
        run, waits = RunFolder(self.folder / key), key in self._waiting
        if not re.fullmatch(r"[0-9a-f]{16}", key) or not (waits or run.log.is_file()):
            raise UserError("this estimate is not kept any more. Start it again.")
        printed = _printed(run)
        took = 0.0 if waits else time.time() - _started(run)
        is_used = took < SECONDS_OF_A_START or user_of(run.path) is not None
        if waits or ("╰" not in printed and is_used and "error: " not in printed):
            recent = sorted(self.folder.iterdir(), key=lambda one: one.stat().st_mtime)[-RECENT:]
            usual = [one.log.stat().st_mtime - _started(one) for one in map(RunFolder, recent) if "╰" in _printed(one)]
            now = "waiting for another estimate" if waits else (printed.split("\n")[:-1] or ["starting"])[-1]
            return {"key": key, "now": now, "took": took, "usual": statistics.median(usual) if usual else None}
        if "╰" not in printed:
            return {"mistake": printed.rpartition("error: ")[2] if "error: " in printed else "This estimate was ended."}
        rows: list[list[str]] = []
        for name, text in re.findall(r"^│ (.*?)  +(.*?) *│$", printed, re.MULTILINE):
            if name:
                rows.append([name, text])
            else:
                rows[-1][1] += f" {text}"
        notes = [text for name, text in rows if name == "note"]
        return {"key": key, "facts": {name: text for name, text in rows if name != "note"}, "notes": notes}


def _printed(run: RunFolder) -> str:
    return read_bytes(run.log, MOST_BYTES).decode("utf-8", "replace") if run.log.is_file() else ""


def _started(run: RunFolder) -> float:
    return (run.path / LOCK).stat().st_mtime
