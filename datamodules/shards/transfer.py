"""Bytes of a URL, read with retries."""

import io
import logging
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from datamodules.errors import UserError
from datamodules.shards.failures import command_failure, failure, shown
from datamodules.shards.stores import locate

if TYPE_CHECKING:
    from obstore import GetOptions

log = logging.getLogger("retouch")

ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one


class StoppedError(Exception):
    """The bytes are no longer needed."""


class DamagedError(Exception):
    """The bytes are not what was written."""


# What a stream of `open_url` or its reader may raise: reading again from the start may help.
BROKEN = (OSError, EOFError, tarfile.TarError, DamagedError)


class Attempts:
    """Counts consecutive failures, and waits between attempts.

    Args:
        url: what is read or written.
        known: whether its host was reached before: then a failed name lookup is retried.
        stopped: set when the bytes are no longer needed.
        setting: that names the URL.
        done: read or written, for messages.
    """

    def __init__(
        self, url: str, known: bool, stopped: threading.Event, setting: str = "data.shards", done: str = "read"
    ) -> None:
        self.url = url
        self.setting = setting
        self.done = done
        self.known = known
        self.stopped = stopped
        self.count = 0

    def after(self, error: Exception, stream: IO[bytes] | None = None) -> None:
        """Wait before the next attempt.

        Raises:
            UserError: another attempt would not help, or all were made.
            StoppedError: the bytes are no longer needed.
        """
        self.count += 1
        what, lasts = command_failure(stream) or failure(error, self.url, self.known, self.done)
        # `from None`: the cause may quote the URL with its credentials.
        if lasts:
            raise UserError(f"{self.setting}: {shown(self.url)} {what}") from None
        if self.count == ATTEMPTS:
            what = f"cannot be {self.done}: {what} ({self.count} attempts)"
            raise UserError(f"{self.setting}: {shown(self.url)} {what}") from None
        pause = PAUSE * 2 ** (self.count - 1)
        log.warning(f"note: {shown(self.url)}: {what}; attempt {self.count + 1} of {ATTEMPTS} in {pause:g} s")
        if self.stopped.wait(pause):
            raise StoppedError from None


def open_url(url: str, known: bool, stopped: threading.Event) -> IO[bytes]:
    """The bytes of a URL, a local path, or a command after `pipe:`, as a stream."""
    if url.startswith("pipe:"):
        from webdataset.gopen import gopen  # imports torch

        return gopen(url, "rb")
    if url.startswith("file://"):
        url = url2pathname(urlsplit(url).path)
    if "://" not in url:
        return Path(url).expanduser().open("rb")
    return io.BufferedReader(Transfer(Attempts(url, known, stopped)), 1 << 20)


def fetch(url: str) -> bytes:
    """The bytes of a small file."""
    attempts = Attempts(url, known=False, stopped=threading.Event())
    while True:
        stream = None
        try:
            with open_url(url, attempts.known, attempts.stopped) as stream:
                return stream.read()
        except BROKEN as error:
            attempts.after(error, stream)


class Transfer(io.RawIOBase):
    """The bytes of an object as a stream: a transfer that breaks off is resumed at its position.

    Servers without range requests send the object from its start again, and the bytes read before are skipped.
    """

    def __init__(self, attempts: Attempts) -> None:
        super().__init__()
        self.attempts = attempts
        self.place = 0
        self.size = -1
        self.tag: str | None = None
        self.chunks: Iterator[bytes] | None = None
        self.ranges = True  # until the server refuses one
        self.again = 0  # bytes still to skip
        self.rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self.rest:
            self.rest = memoryview(self._chunk())
        count = min(len(buffer), len(self.rest))
        buffer[:count] = self.rest[:count]
        self.rest = self.rest[count:]
        return count

    def close(self) -> None:
        self.chunks = None
        super().close()

    def _chunk(self) -> bytes:
        """The next bytes; empty at the end."""
        from obstore.exceptions import BaseError

        while True:
            try:
                if self.chunks is None:
                    self.chunks = self._connect()
                for chunk in self.chunks:
                    new = chunk[self.again :]
                    self.again = max(0, self.again - len(chunk))
                    if new:
                        self.place += len(new)
                        self.attempts.count = 0
                        return new
                if self.place == self.size:
                    return b""
                raise EOFError(f"broke off after {self.place} of {self.size} bytes")
            except (BaseError, OSError, EOFError) as error:
                self.chunks = None
                self.attempts.after(error)

    def _connect(self) -> Iterator[bytes]:
        import obstore
        from obstore.exceptions import NotSupportedError

        store, path = locate(self.attempts.url)
        try:
            options: GetOptions = {"range": {"offset": self.place}} if self.place and self.ranges else {}
            result = obstore.get(store, path, options=options)
        except NotSupportedError:
            self.ranges = False
            result = obstore.get(store, path)
        self.again = self.place - result.range[0]
        size, tag = result.meta["size"], result.meta["e_tag"]
        if self.size not in (-1, size) or (self.tag and tag and self.tag != tag):
            raise DamagedError("it changed while it was read")
        self.size, self.tag = size, tag
        return iter(result.stream(min_chunk_size=1))
