"""Locks on folders, which end with their process, however that ends."""

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import psutil
from filelock import lock_descriptor

from foundation.errors import UserError
from foundation.files import require_file

log = logging.getLogger("retouch")

LOCK = ".lock"
ON_WINDOWS = not hasattr(os, "fork")
_files: WeakSet[FileIO] = WeakSet()
if not ON_WINDOWS:
    # A forked data worker, which may outlive a killed command, must not keep its locks.
    os.register_at_fork(after_in_child=lambda: list(map(FileIO.close, _files)))


class Holder(NamedTuple):
    """A process that holds a lock."""

    host: str
    pid: int

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()


@contextmanager
def in_use(folder: Path, wait: bool = False) -> Iterator[None]:
    """Temporarily keep other commands out of a folder; if one holds the lock, raise a UserError, or `wait` for it."""
    path = folder / LOCK
    with ExitStack() as stack:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = stack.enter_context(open_own(path))
            except FileNotFoundError:  # the command that held the lock has just removed the folder
                continue
            _files.add(file)
            try:
                if not lock_descriptor(file.fileno(), blocking=False):
                    if not wait:
                        raise UserError(f"output_dir={folder} is in use by another command: choose another, or wait")
                    log.info(f"another command is filling {folder}: waiting for it")
                    lock_descriptor(file.fileno())
            except OSError as error:
                log.warning(f"note: no locks in {folder} ({error.strerror}): write there by one command at a time")
                break
            with suppress(FileNotFoundError):  # the command that held the lock has just removed the file
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
        with suppress(OSError):  # a full disk: task=clean frees it
            file.truncate(0)
            # Windows refuses to others even the reading of the locked byte, the first.
            file.write(lock_content(os.getpid()))
        try:
            yield
        finally:
            if ON_WINDOWS:  # which deletes no open file
                stack.close()
            with suppress(OSError):
                path.unlink()


def open_own(path: Path) -> FileIO:
    """Open a file in a folder of unknown origin to append to it; raise a UserError if it is a link, pipe or device."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is a link or a pipe, not a file of ours. Remove it.")
    return path.open("ab", buffering=0)


def lock_content(pid: int) -> bytes:
    return f" {platform.node()} {pid} {psutil.Process(pid).create_time()}".encode()


def holder(folder: Path) -> Holder | None:
    """Return the process that uses a folder, without touching the lock; None if none does.

    A process of another host may have ended: only the age of its files shows that.
    """
    with suppress(OSError, ValueError, psutil.NoSuchProcess):  # no lock, or one that is just being taken
        require_file(folder / LOCK)
        with (folder / LOCK).open("rb", buffering=0) as file:
            file.seek(1)
            host, pid, created = file.read(1000).decode().split()
        found = Holder(host, int(pid))
        if not found.is_here:
            return found
        process = psutil.Process(found.pid)
        # Linux computes the time by a clock that is adjusted.
        if process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - float(created)) < 10:
            return found
    return None


@contextmanager
def one_at_a_time(folder: Path, shared: bool = False) -> Iterator[None]:
    """Temporarily keep other processes waiting, if `shared` only those that do not share; no effect without flock."""
    with ExitStack() as stack:
        with suppress(OSError, ImportError):
            import fcntl

            descriptor, how = os.open(folder, os.O_RDONLY), fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info(f"waiting for another process, which uses {folder}")
                fcntl.flock(descriptor, how)
        yield
