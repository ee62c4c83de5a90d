"""Runs that the page starts: processes of their own, which go on without it."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from runs.run_folder import RunFolder

TRAIN = Path(__file__).parent.parent / "train.py"


class Jobs:
    """The processes that the page has started; `free` makes room for them in the GPU's memory."""

    def __init__(self, free: Callable[[], None]) -> None:
        self.free = free
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: Sequence[str], run: RunFolder, script: str = "train") -> None:
        """Start train.py, or predict.py, with its output in the run's log."""
        self.free()
        self._started = [process for process in self._started if process.poll() is None]  # no zombies
        run.path.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(TRAIN.with_stem(script)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the page only
            )
        self._started.append(process)
