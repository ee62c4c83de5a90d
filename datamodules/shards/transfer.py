"""Reading and writing objects with retries: whole objects, streams, and a folder in a bucket."""

import hashlib
import io
import logging
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import obstore
from obstore.exceptions import BaseError, NotSupportedError

from datamodules.errors import UserError, without_credentials
from datamodules.files import replacing
from datamodules.shards.stores import failure, is_bucket_absent, kind_of, locate
from datamodules.shards.tar import DamagedError

if TYPE_CHECKING:
    from obstore import GetResult

log = logging.getLogger("retouch")

Result = TypeVar("Result")
ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
# The metadata of an object with the checksum of its content.
CHECKSUM = "sha256"
# Of 5 MiB, uploaded at once: few, since each must be sent within the timeout, even on a slow connection.
UPLOADED_PARTS = 2


class StoppedError(Exception):
    """The bytes are no longer needed."""


# The errors of a stream or its reader after which another attempt may help.
BROKEN = (BaseError, OSError, EOFError, tarfile.TarError, DamagedError)


@dataclass
class Attempts:
    """Counts consecutive failures, and waits between attempts.

    Attributes:
        url: that is read or written.
        setting: that specifies the URL, for messages.
        done: read or written, for messages.
        stopped: set when the bytes are no longer needed.
    """

    url: str
    setting: str = "data.shards"
    done: str = "read"
    stopped: threading.Event = field(default_factory=threading.Event)
    count: int = 0

    def after(self, error: Exception) -> None:
        """Wait before the next attempt.

        Raises:
            UserError: another attempt would not help, or all were made.
            StoppedError: the bytes are no longer needed.
        """
        self.count += 1
        problem, lasts = failure(error, self.url, self.done)
        shown = without_credentials(self.url)
        # `from None`: the cause may quote the URL with its credentials.
        if lasts:
            raise UserError(f"{self.setting}: {shown} {problem}") from None
        if self.count == ATTEMPTS:
            raise UserError(f"{self.setting}: {shown} cannot be {self.done}: {problem} ({ATTEMPTS} attempts)") from None
        pause = PAUSE * 2 ** (self.count - 1)
        log.warning(f"note: {shown}: {problem}; attempt {self.count + 1} of {ATTEMPTS} in {pause:g} s")
        if self.stopped.wait(pause):
            raise StoppedError from None


def fetch(url: str) -> bytes:
    """Return the bytes of a small object; raises a UserError if it cannot be read."""
    attempts = Attempts(url)
    while True:
        try:
            store, path = locate(url)
            return bytes(obstore.get(store, path).bytes())
        except BROKEN as error:
            attempts.after(error)


class ObjectStream:
    """The bytes of an object as a stream.

    Attributes:
        tag: identifies the object's content; None if the server specifies none.
    """

    def __init__(self, chunks: Iterator[bytes], skip: int, size: int, tag: str | None) -> None:
        self.tag = tag
        self._chunks = chunks
        self._skip = skip  # bytes still to skip
        self._missing = size + skip
        self._ready = b""

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end."""
        while not self._ready and self._missing:
            chunk = bytes(next(self._chunks, b""))
            if not chunk:
                raise EOFError(f"broke off {self._missing} bytes before its end")
            self._missing -= len(chunk)
            self._ready = chunk[self._skip :]
            self._skip = max(0, self._skip - len(chunk))
        result, self._ready = self._ready[:size], self._ready[size:]
        return result


def open_url(url: str, start: int = 0) -> ObjectStream:
    """Open an object as a stream from the byte `start`."""
    store, path = locate(url)
    try:
        result = obstore.get(store, path, options={"range": {"offset": start}} if start else {})
    except NotSupportedError:  # a server without ranges
        result = obstore.get(store, path)
    first, end = result.range
    return ObjectStream(iter(result.stream(min_chunk_size=1)), start - first, end - start, result.meta["e_tag"])


class Bucket:
    """A folder in a bucket: s3://, gs:// or az://.

    Args:
        url: of the folder.
        setting: that specifies it, for messages.
    """

    def __init__(self, url: str, setting: str) -> None:
        if kind_of(url) not in ("s3", "gs", "az"):
            raise UserError(f"{setting}={without_credentials(url)}: name a folder, or one in s3://, gs:// or az://")
        self.url = url
        self.setting = setting
        self.store, path = locate(url, setting)
        self.prefix = f"{path.strip('/')}/" if path.strip("/") else ""

    def __str__(self) -> str:
        return without_credentials(self.url)

    def attempt(self, work: Callable[[], Result], done: str = "read") -> Result:
        """Return the result of `work`, with several attempts.

        Args:
            done: read or written, for messages.

        Raises:
            FileNotFoundError: there is no such object.
            UserError: there is no such bucket, or the attempts have failed.
        """
        attempts = Attempts(self.url, self.setting, done)
        while True:
            try:
                return work()
            except BROKEN as error:
                if isinstance(error, FileNotFoundError) and not is_bucket_absent(error):
                    raise
                attempts.after(error)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object by its path in the folder."""
        found = self.attempt(lambda: obstore.list(self.store, self.prefix).collect())
        # S3's console creates empty objects that are named as folders.
        folders = {str(folder) for one in found for folder in PurePosixPath(one["path"]).parents}
        folders.add(self.prefix.rstrip("/"))
        return {one["path"].removeprefix(self.prefix): one["size"] for one in found if one["path"] not in folders}

    def read(self, name: str) -> bytes | None:
        """Return the bytes of an object; None if there is none."""

        def get() -> bytes:
            got = obstore.get(self.store, self.prefix + name)
            data = bytes(got.bytes())
            _compare(got, name, hashlib.sha256(data).hexdigest())
            return data

        try:
            return self.attempt(get)
        except FileNotFoundError:
            return None

    def checksum(self, name: str) -> str | None:
        """Return the sha256 of an object's content, or an empty text if another program wrote it; None if absent."""
        try:
            got = self.attempt(lambda: obstore.get(self.store, self.prefix + name, options={"head": True}))
        except FileNotFoundError:
            return None
        return str(got.attributes.get(CHECKSUM, ""))

    def download(self, name: str, path: Path) -> None:
        """Replace a file by an object; raises FileNotFoundError if there is none."""

        def fetch() -> None:
            got = obstore.get(self.store, self.prefix + name)
            digest = hashlib.sha256()
            with replacing(path) as temporary, temporary.open("wb") as file:
                for chunk in got.stream():
                    file.write(chunk)
                    digest.update(chunk)
                _compare(got, name, digest.hexdigest())
                if file.tell() != got.meta["size"]:
                    raise DamagedError(f"broke off after {file.tell()} of {got.meta['size']} bytes")

        self.attempt(fetch)

    def write(self, name: str, content: Path | bytes) -> None:
        """Create or replace an object by a file or by bytes."""

        def put() -> None:
            with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
                checked = {CHECKSUM: _sha256(file)}
                obstore.put(self.store, self.prefix + name, file, attributes=checked, max_concurrency=UPLOADED_PARTS)

        self.attempt(put, "written")

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; some may be absent."""
        for path in [self.prefix + name for name in names]:
            with suppress(FileNotFoundError):
                self.attempt(partial(obstore.delete, self.store, path), "written")


def _compare(got: "GetResult", name: str, sha256: str) -> None:
    """Raise a DamagedError unless an object is as it was uploaded; one of another program may have no checksum."""
    if got.attributes.get(CHECKSUM, sha256) != sha256:
        raise DamagedError(f"{name} is not as it was uploaded")


def _sha256(file: BinaryIO) -> str:
    """Return the checksum of an open file, which is then at its start again."""
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    file.seek(0)
    return digest.hexdigest()
