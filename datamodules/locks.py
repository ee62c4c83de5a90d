"""Locks on folders, which end with their process, however that ends."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from datamodules.errors import UserError

log = logging.getLogger("retouch")

LOCK = ".lock"


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
                file = stack.enter_context(path.open("w"))
            except FileNotFoundError:  # the command that held the lock has just removed the folder
                continue
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    log.warning(f"note: no locks in {folder} ({error.strerror}): write there by one command at a time")
                    break
                if not wait:
                    raise UserError(
                        f"output_dir={folder} is in use by another command: choose another folder, or wait for it"
                    ) from error
                log.info(f"another command is filling {folder}: waiting for it")
                fcntl.lockf(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # the command that held the lock has just removed the file
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def one_at_a_time(folder: Path, shared: bool = False) -> Iterator[None]:
    """Temporarily keep other processes waiting; without effect on a file system without locks.

    Args:
        shared: wait only for processes that do not share, and keep only these waiting.
    """
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
