"""Runs that the page starts: processes of their own, which go on without it, and the queue of those that wait."""

import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from datamodules.errors import UserError
from datamodules.files import reading, replacing
from datamodules.locks import LOCK, holder, in_use, lock_content
from runs.run_folder import RunFolder

TRAIN = Path(__file__).parent.parent / "train.py"


def _is_used(folder: Path) -> bool:
    """Return whether a process of this machine uses a folder."""
    return (one := holder(folder)) is not None and one.host == platform.node()


class Jobs:
    """Started processes, and a queue that all pages on a folder share. Before a start, `free` releases memory."""

    def __init__(self, outputs: Path, free: Callable[[], None]) -> None:
        self.outputs, self.free = outputs, free
        self._queue = outputs / ".queue" / "waiting.json"
        self._started: list[subprocess.Popen[bytes]] = []
        self._one_thread = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, arguments: Sequence[str], run: RunFolder, script: str = "train") -> None:
        """Start train.py, or predict.py, with its output in the run's log; it counts as running at once."""
        self.free()
        self._started = [process for process in self._started if process.poll() is None]  # no zombies
        with self._one_thread:
            if _is_used(run.path):
                raise UserError(f"{run} is in use by another command. Wait until it ends.")
            run.path.mkdir(parents=True, exist_ok=True)
            with run.log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, str(TRAIN.with_stem(script)), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C ends the page only
                )
            (run.path / LOCK).write_bytes(lock_content(process.pid))
        self._started.append(process)

    def waiting(self) -> dict[str, list[str]]:
        """Return the arguments of train.py in the queue by the run's folder."""
        if not self._queue.is_file():
            return {}
        with reading(self._queue, "remove it"):
            content = json.loads(self._queue.read_text(encoding="utf-8"))
            return {run: list(map(str, arguments)) for run, arguments in content.items()}

    @contextmanager
    def changing(self) -> Iterator[dict[str, list[str]]]:
        """Temporarily keep other pages out of the queue, and save it at the end."""
        with in_use(self._queue.parent, wait=True):
            yield (waiting := self.waiting())
            with replacing(self._queue) as temporary:
                temporary.write_text(json.dumps(waiting), encoding="utf-8")

    def start_next(self) -> None:
        """Start the first run of the queue unless another one runs on this machine."""
        if self.waiting() and not self._is_busy():
            with self.changing() as waiting:
                if waiting and not self._is_busy():
                    folder = next(iter(waiting))
                    self.start(waiting[folder], RunFolder(folder))
                    del waiting[folder]

    def _is_busy(self) -> bool:
        locks = [lock for depth in ("*", "*/*", "*/*/*") for lock in self.outputs.glob(f"[!.]{depth}/{LOCK}")]
        return any(_is_used(lock.parent) for lock in locks)

    def _watch(self) -> None:
        while True:
            with suppress(UserError, OSError, ValueError):  # a full disk; a damaged queue, which the page shows
                self.start_next()
            time.sleep(2)
