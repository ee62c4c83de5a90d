"""Hooks: functions that run in the process of a command before it starts, bound by functools.partial."""

import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")


def on_changes(pattern: str, act: Callable[[str], None]) -> None:
    """Call `act` before each change of a file below the present folder: it is opened to write, renamed, removed.

    Args:
        pattern: regular expression for the paths, relative to the current folder.
    """
    found, here = re.compile(pattern), os.getcwd() + os.sep

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(arguments[2], int) or not arguments[2] & WRITING:
                return
        elif event not in CHANGES:
            return
        if not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.path.abspath(os.fspath(arguments[0]))
        if path.startswith(here) and found.search(path.removeprefix(here)):
            act(path.removeprefix(here))

    sys.addaudithook(hook)


def note_changes(pattern: str, file: str) -> None:
    """Write the path of each change to a file, a line each."""
    place = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    on_changes(pattern, lambda path: void(os.write(place, f"{path}\n".encode())))


def void(result: object) -> None:
    """Return a function that drops the result of a call."""


def signal_at(pattern: str, count: int, number: int) -> None:
    """Send this process a signal before its change number `count`, counted from one."""
    seen = 0

    def act(path: str) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), number)

    on_changes(pattern, act)


def limit_files(size: int) -> None:
    """Limit the bytes of each file of this process: a full disk, if none can be mounted."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def count_encodings(file: str) -> None:
    """Append a byte to a file for each encoded sample."""
    from callbacks import shard_writer

    write = shard_writer.write_sample

    def write_and_count(*arguments: Any) -> None:
        write(*arguments)
        with Path(file).open("a") as counted:
            counted.write("x")

    shard_writer.write_sample = write_and_count  # type: ignore[assignment]


def be_quick() -> None:
    """Shorten the pauses of retries, and make the tars of a cache small."""
    from callbacks import shard_writer
    from datamodules.shards import transfer

    shard_writer.SHARD_SIZE = 60_000
    transfer.PAUSE = 0.1
