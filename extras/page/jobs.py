"""Runs that the page starts: processes of their own, which go on without it, and the queue of those that wait."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cli.arguments import read_values
from foundation.errors import UserError, printable
from foundation.files import link_below, read_bytes, reading, reason, replacing
from foundation.locks import LOCK, Holder, holder, in_use, lock_content, open_own
from report.quoting import argument
from runs.config_file import MOST_BYTES
from runs.run_folder import RunFolder

TRAIN = Path(__file__).parents[2] / "train.py"
# On Windows, Ctrl-C stays within a group, and only processes of one console can be interrupted or end with its window.
NEW_GROUP, NO_CONSOLE = (getattr(subprocess, name, 0) for name in ("CREATE_NEW_PROCESS_GROUP", "CREATE_NO_WINDOW"))
# Settings of commands that load no model.
LIGHT = {"task=inspect", "task=export", "task=dry_run"}
# The names of commands that use a folder: a lock from elsewhere may name any process.
COMMANDS = ("train", "predict", "retouch-train", "retouch-predict")


def user_of(folder: Path) -> Holder | None:
    """Return the command that uses a folder; None if none does, or if its lock names another program."""
    one = holder(folder)
    with suppress(psutil.Error):
        words = psutil.Process(one.pid).cmdline() if one and one.is_here else []
        if not words or {*COMMANDS} & {Path(word).stem for word in words}:  # a process has none while it starts
            return one
    return None


def _is_used(folder: Path) -> bool:
    return (one := user_of(folder)) is not None and one.is_here


def run_below(outputs: Path, place: str) -> RunFolder:
    """Return a run's folder of a form or of the queue; raise a UserError if it is not below the folder of the runs."""
    full, top = Path(place if place.isprintable() else "").resolve(), outputs.resolve()
    parts = full.relative_to(top).parts if full.is_relative_to(top) else ()
    if not 1 <= len(parts) <= 2 or any(part.startswith(".") for part in parts):
        raise UserError(f"output_dir={printable(place)}: it is not below {outputs}/. Write {outputs}/NAME.")
    return RunFolder(outputs.joinpath(*parts))


def require_no_link(outputs: Path, path: Path) -> None:
    """Raise a UserError if a path below the folder of the runs is a link, or below one."""
    if link := link_below(outputs, path):
        raise UserError(f"{link} is a link, and the page writes through none. Use the command line, or replace it.")


class Jobs:
    """Started processes, and a queue that all pages on a folder share. Before a start, `free` releases memory."""

    def __init__(self, outputs: Path, free: Callable[[], None]) -> None:
        self.outputs, self.free = outputs, free
        self._queue = outputs / ".queue" / "waiting.json"
        self._started: list[subprocess.Popen[bytes]] = []
        self.failed: dict[str, str] = {}  # runs of the queue that could not be started, with the reason
        self._one_thread = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, arguments: Sequence[str], run: RunFolder, script: str = "train") -> subprocess.Popen[bytes]:
        """Start train.py, or predict.py, with its output in the run's log; it counts as running at once."""
        self._started = [process for process in self._started if process.poll() is None]  # no zombies
        with self._one_thread:
            if _is_used(run.path):
                raise UserError(f"{run} is in use by another command. Wait until it ends.")
            for path in (run.path, *run.path.glob("*"), *run.samples.glob("*")):
                require_no_link(self.outputs, path)
            run.path.mkdir(parents=True, exist_ok=True)
            with open_own(run.log) as log, open_own(run.path / LOCK) as lock:
                lock.write(lock_content(os.getpid()))
                if LIGHT.isdisjoint(arguments):  # refused starts and full disks free nothing
                    self.free()
                process = subprocess.Popen(
                    [sys.executable, str(TRAIN.with_stem(script)), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C ends the page only
                    creationflags=NEW_GROUP | NO_CONSOLE,
                )
                lock.truncate(0)
                lock.write(lock_content(process.pid))
        self._started.append(process)
        return process

    def waiting(self) -> dict[str, list[str]]:
        """Return the arguments of train.py in the queue by the run's folder."""
        if not self._queue.is_file():
            return {}
        with reading(self._queue, "remove it"):
            content = json.loads(read_bytes(self._queue, MOST_BYTES))
            return {printable(run): [printable(str(one)) for one in arguments] for run, arguments in content.items()}

    @contextmanager
    def changing(self) -> Iterator[dict[str, list[str]]]:
        """Temporarily keep other pages out of the queue, and save it at the end."""
        require_no_link(self.outputs, self._queue)
        with in_use(self._queue.parent, wait=True), replacing(self._queue, private=True) as temporary:
            waiting = self.waiting()  # it may contain passwords of URLs
            temporary.write_text(json.dumps(waiting), encoding="utf-8")  # else a full disk is noticed after a start
            yield waiting
            temporary.write_text(json.dumps(waiting), encoding="utf-8")

    def start_next(self) -> None:
        """Start the first run of the queue that can be started, unless another one runs on this machine."""
        if self.waiting().keys() - self.failed and not self._is_busy():
            with self.changing() as waiting:
                for folder in [] if self._is_busy() else [one for one in waiting if one not in self.failed]:
                    try:
                        self._start_waiting(folder, waiting[folder])
                        del waiting[folder]
                        return
                    except Exception as error:  # whatever it is, the others start, and the page shows it
                        self.failed[folder] = reason(error)

    def _start_waiting(self, folder: str, arguments: list[str]) -> None:
        """Start a run of the queue, whose file anybody may have written."""
        run = run_below(self.outputs, folder)
        *settings, place = arguments
        if place != argument("output_dir", folder) or str(run) != folder:
            raise UserError(f"{place!r:.99} is not the run's output_dir")
        read_values(settings, "train")
        self.start(arguments, run)

    def _is_busy(self) -> bool:
        locks = [lock for depth in ("*", "*/*", "*/*/*") for lock in self.outputs.glob(f"[!.]{depth}/{LOCK}")]
        return any(_is_used(lock.parent) for lock in locks)

    def _watch(self) -> None:
        while True:
            with suppress(Exception):  # a full disk; a damaged queue, which the page shows: the next look may succeed
                self.start_next()
            time.sleep(2)
