"""Locks on folders, which end with their process, however that ends."""

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from filelock import lock_descriptor

from datamodules.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("retouch")

LOCK = ".lock"
# Seconds by which two readings of a process's creation time may differ: Linux's clock is adjusted in between.
CLOCK_DRIFT = 10.0
_open: set[int] = set()


def _close_in_child() -> None:
    """Close the lock files in a forked data worker, which may outlive a killed command."""
    while _open:
        os.close(_open.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class Holder(NamedTuple):
    """A process that holds a lock."""

    host: str
    pid: int


@contextmanager
def in_use(folder: Path, wait: bool = False) -> Iterator[None]:
    """Temporarily keep other commands out of a folder.

    Args:
        wait: for a command that holds the lock, instead of an error.

    Raises:
        UserError: another command holds the lock.
    """
    path = folder / LOCK
    with ExitStack() as stack:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = stack.enter_context(_opened(path))
            except FileNotFoundError:  # the command that held the lock has just removed the folder
                continue
            try:
                if not lock_descriptor(descriptor, blocking=False):
                    if not wait:
                        raise UserError(
                            f"output_dir={folder} is in use by another command: choose another folder, or wait for it"
                        )
                    log.info(f"another command is filling {folder}: waiting for it")
                    lock_descriptor(descriptor)
            except OSError as error:
                log.warning(f"note: no locks in {folder} ({error.strerror}): write there by one command at a time")
                break
            with suppress(FileNotFoundError):  # the command that held the lock has just removed the file
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
        with suppress(OSError):  # a full disk: task=clean frees it
            os.ftruncate(descriptor, 0)
            # Windows refuses to others even the reading of the locked byte, the first.
            os.write(descriptor, f" {platform.node()} {os.getpid()} {psutil.Process().create_time()}".encode())
        try:
            yield
        finally:
            if os.name == "nt":  # which deletes no open file
                stack.close()
            with suppress(OSError):
                path.unlink()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Temporarily open a lock file, unchanged."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _open.add(descriptor)
    try:
        yield descriptor
    finally:
        _open.discard(descriptor)
        os.close(descriptor)


def holder(folder: Path) -> Holder | None:
    """Return the process that uses a folder, without touching the lock; None if none does.

    A process of another host may have ended: only the age of its files shows that.
    """
    try:
        with (folder / LOCK).open("rb", buffering=0) as file:
            file.seek(1)
            host, pid, created = file.read().decode().split()
        if host == platform.node():
            process = psutil.Process(int(pid))
            ended = process.status() == psutil.STATUS_ZOMBIE
            if ended or abs(process.create_time() - float(created)) > CLOCK_DRIFT:
                return None
    except (OSError, ValueError, psutil.NoSuchProcess):  # no lock, or one that is just being taken
        return None
    return Holder(host, int(pid))


@contextmanager
def one_at_a_time(folder: Path, shared: bool = False) -> Iterator[None]:
    """Temporarily keep other processes waiting; without effect on Windows and on file systems without locks.

    Args:
        shared: wait only for processes that do not share, and keep only these waiting.
    """
    if fcntl is None:
        yield
        return
    descriptor, how = os.open(folder, os.O_RDONLY), fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info(f"waiting for another process, which uses {folder}")
                fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
