"""Dry runs: jobs of their own, with progress, whose results are kept by their settings."""

import hashlib
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extras.page.jobs import TRAIN
from foundation.errors import UserError
from foundation.files import require_file
from foundation.locks import open_own

# Results whose durations tell how long the next one will take.
RECENT = 20


@dataclass
class _Job:
    process: subprocess.Popen[bytes]
    windows: set[str]


class Plans:
    """Dry runs, whose output is kept in a folder.

    The first line of each file is the time of its start; its last change is the time of its end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._one_thread = threading.Lock()
        self._jobs: dict[str, _Job] = {}

    def start(self, arguments: Sequence[str], window: str, again: bool) -> str:
        """Start a dry run, unless its result is kept or on its way; end the one before of the same window.

        Returns:
            The key of its settings.
        """
        key = hashlib.sha256("\n".join(arguments).encode()).hexdigest()[:16]
        output = self.folder / f"{key}.txt"
        with self._one_thread:
            for other, job in self._jobs.items():
                (job.windows.add if other == key else job.windows.discard)(window)
                if not job.windows:
                    job.process.kill()
            if self._is_running(key) or (output.is_file() and not again and "╰" in self._read(output)[1]):
                return key
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_own(output) as file:
                file.truncate(0)
                file.write(f"{time.time()}\n".encode())
                command = [sys.executable, str(TRAIN), *arguments, f"output_dir={self.folder}", "task=dry_run"]
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": file}
                process = subprocess.Popen(command, env={**os.environ, "COLUMNS": "2000"}, **streams)
            self._jobs[key] = _Job(process, {window})
        return key

    def state(self, key: str) -> dict[str, Any]:
        """Return a dry run's rows and notes, or its mistake; of a running one, its last line and its seconds."""
        started, printed = self._read(self.folder / f"{key}.txt")
        if self._is_running(key):
            lines = printed.split("\n")[:-1] or ["starting"]
            return {"key": key, "now": lines[-1], "took": time.time() - started, "usual": self._usual()}
        if "╰" not in printed:
            return {"mistake": printed.rpartition("error: ")[2] if "error: " in printed else "This estimate was ended."}
        rows = re.findall(r"^│ (.*?)  +(.*?) *│$", printed, re.MULTILINE)
        notes = [text for name, text in rows if name == "note"]
        facts = {name: text for name, text in rows if name not in ("note", "")}
        return {"key": key, "facts": facts, "notes": notes, "made": started}

    def _is_running(self, key: str) -> bool:
        return key in self._jobs and self._jobs[key].process.poll() is None

    def _read(self, path: Path) -> tuple[float, str]:
        """Return when a dry run started, and what it has printed."""
        if not re.fullmatch(r"[0-9a-f]{16}", path.stem) or not path.is_file():
            raise UserError("this estimate is not kept any more. Start it again.")
        require_file(path)
        started, _, printed = path.read_text("utf-8", "replace").partition("\n")
        return float(started), printed

    def _usual(self) -> float | None:
        """Return the median of the seconds that recent dry runs took; None without any."""
        ended = [one for one in self.folder.glob("*.txt") if "╰" in self._read(one)[1]]
        ended.sort(key=lambda one: one.stat().st_mtime)
        return statistics.median(one.stat().st_mtime - self._read(one)[0] for one in ended[-RECENT:]) if ended else None
