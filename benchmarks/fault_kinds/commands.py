"""Commands in processes of their own, which are forked of one that has imported everything."""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.fault_kinds.imported"])
# Rounds run in threads; two that look at one process at the same time would read its status twice.
LOCK = threading.Lock()
# Called in a command's process before it begins.
Hook = Callable[[], None]


class Command:
    """A running train.py or predict.py.

    Args:
        folder: where it runs.
        log: the file that gets what it prints.
        hooks: functions of modules that its process can import.
    """

    def __init__(
        self,
        script: str,
        overrides: Sequence[str],
        folder: Path,
        log: Path,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.line = " ".join([f"{script}.py", *overrides])
        self.log = log
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "250"}
        with LOCK:
            self._process = CONTEXT.Process(
                target=work, args=(script, list(overrides), folder, log, list(hooks), settings)
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status; negative for a signal, None while it runs."""
        with LOCK:
            return self._process.exitcode

    @property
    def text(self) -> str:
        """The output so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def send(self, number: int) -> bool:
        """Send a signal; return whether the process was still running."""
        if self.status is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return True

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, or None after a timeout."""
        end = time.monotonic() + seconds
        while (status := self.status) is None and time.monotonic() < end:
            time.sleep(0.01)
        return status

    def end(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(30)


def work(
    script: str, overrides: list[str], folder: Path, log: Path, hooks: list[Hook], environment: dict[str, str]
) -> None:
    """Do the work of the process."""
    os.setsid()
    with log.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = [str(ROOT / f"{script}.py"), *overrides]
    for hook in hooks:
        hook()
    importlib.import_module(script).main()
