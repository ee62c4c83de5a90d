"""Commands in processes of their own that have nothing to import: they are forked of one that did."""

import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import TimeoutExpired

from tests.support.commands import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.fault_kinds.imported", "tests.support.tiny_pipelines"])
SERVER = multiprocessing.forkserver._forkserver


def serve() -> str:
    """Start the process from which commands are forked, and return its address."""
    with contextlib.chdir(ROOT):  # where the process looks for what it imports
        SERVER.ensure_running()
    return SERVER._forkserver_address


def connect(address: str) -> None:
    """Fork from a process that pytest's first process has started, instead of one that imports all again."""
    SERVER._forkserver_address, SERVER._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    SERVER.ensure_running = lambda: None


class Warm:
    """A running command, to be used like a subprocess.Popen; what it prints goes to a file."""

    def __init__(
        self, script: str, *overrides: str, cwd: Path = ROOT, before: Callable[[], None] | None = None
    ) -> None:
        self.stdout = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  closed by `end`
        arguments = script, [str(one) for one in overrides], self.stdout.name, cwd, dict(os.environ), before
        serve()
        self._process = CONTEXT.Process(target=command, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired("command", timeout)
        return self.returncode

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self.stdout.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self.stdout.read(), None


def command(
    script: str,
    overrides: list[str],
    output: str,
    cwd: Path,
    environment: dict[str, str],
    before: Callable[[], None] | None,
) -> None:
    """Do the work of a new process of train.py or predict.py."""
    os.setsid()
    with open(output, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = [str(ROOT / f"{script}.py"), *overrides]
    if before is not None:
        before()
    importlib.import_module(script).main()
