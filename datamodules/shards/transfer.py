"""A folder in a bucket or on a server: its objects are read and written with retries."""

import hashlib
import logging
import time
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

import obstore
from obstore.exceptions import BaseError

from foundation.errors import UserError, without_credentials
from foundation.files import DAMAGED, file_sha256, reason
from foundation.stores import failure, is_bucket_absent, kind_of, locate

log = logging.getLogger("retouch")

Result = TypeVar("Result")
ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
# The metadata of an object with the checksum of its content.
CHECKSUM = "sha256"
# Of 5 MiB, uploaded at once: few, since each must be sent within the timeout, even on a slow connection.
UPLOADED_PARTS = 2


class DamagedError(Exception):
    """The bytes are not as they were written."""


# The errors of a transfer after which another attempt may help.
BROKEN = (BaseError, OSError, EOFError, DamagedError)


class Bucket:
    """A folder at a URL.

    Args:
        url: the folder: s3://, gs:// or az://; https:// and file:// can only be read.
        setting: name of the setting that contains it, for messages.
        writes: whether it will be written to.
    """

    def __init__(self, url: str, setting: str, writes: bool = True) -> None:
        if writes and kind_of(url) not in ("s3", "gs", "az"):
            raise UserError(f"{setting}={without_credentials(url)}: name a folder, or one in s3://, gs:// or az://")
        self.url = url
        self.setting = setting
        self.store, path = locate(url, setting)
        self.prefix = f"{path.strip('/')}/" if path.strip("/") else ""

    def __str__(self) -> str:
        return without_credentials(self.url)

    def attempt(self, work: Callable[[], Result], name: str = "", done: str = "read") -> Result:
        """Return the result of `work`, with several attempts.

        Args:
            name: the object, for messages; empty for the whole folder.
            done: read or written, for messages.

        Raises:
            FileNotFoundError: there is no such object.
            UserError: there is no such bucket, or the attempts have failed.
        """
        folder, mark, query = self.url.partition("?")  # the query may be a token
        shown = without_credentials(f"{folder.rstrip('/')}/{name}".rstrip("/") + mark + query)
        for count in range(1, ATTEMPTS + 1):
            try:
                return work()
            except BROKEN as error:
                if isinstance(error, FileNotFoundError) and not is_bucket_absent(error):
                    raise
                problem, lasts = failure(error, self.url, done)
            # Not within `except`: the error may quote the URL with its credentials.
            if lasts:
                raise UserError(f"{self.setting}: {shown} {problem}")
            if count < ATTEMPTS:
                pause = PAUSE * 2 ** (count - 1)
                log.warning(f"note: {shown}: {problem}; attempt {count + 1} of {ATTEMPTS} in {pause:g} s")
                time.sleep(pause)
        raise UserError(f"{self.setting}: {shown} cannot be {done}: {problem} ({ATTEMPTS} attempts)")

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object by its path in the folder."""
        found = self.attempt(lambda: obstore.list(self.store, self.prefix).collect())
        # S3's console creates empty objects that are named as folders.
        folders = {str(folder) for one in found for folder in PurePosixPath(one["path"]).parents}
        folders.add(self.prefix.rstrip("/"))
        return {one["path"].removeprefix(self.prefix): one["size"] for one in found if one["path"] not in folders}

    def read(self, name: str, parse: Callable[[bytes], Result]) -> Result | None:
        """Return the parsed bytes of an object; None if it does not exist.

        Args:
            parse: raises an error of `DAMAGED` for bytes that are not as they were written.
        """

        def get() -> Result:
            got = obstore.get(self.store, self.prefix + name)
            data = bytes(got.bytes())
            sha256 = hashlib.sha256(data).hexdigest()
            if got.attributes.get(CHECKSUM, sha256) != sha256:  # an object of another program has no checksum
                raise DamagedError(f"{name} is not as it was uploaded")
            try:
                return parse(data)
            except DAMAGED as error:
                raise DamagedError(f"it is damaged ({reason(error)})") from error

        try:
            return self.attempt(get, name)
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, size: int, crc32: int) -> bytes:
        """Return a part of an object; raises a UserError if it is missing or is not as it was written."""

        def get() -> bytes:
            data = bytes(obstore.get_range(self.store, self.prefix + name, start=start, length=size))
            if len(data) < size or zlib.crc32(data) != crc32:
                raise DamagedError("its bytes are not as they were written")
            return data

        try:
            return self.attempt(get, name)
        except FileNotFoundError:
            raise UserError(f"{self.setting}: {self}/{name} is not there") from None

    def write(self, name: str, content: Path | bytes) -> None:
        """Create or replace an object by a file or by bytes."""

        def put() -> None:
            sha256 = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else file_sha256(content)
            attributes = {CHECKSUM: sha256}
            obstore.put(self.store, self.prefix + name, content, attributes=attributes, max_concurrency=UPLOADED_PARTS)

        self.attempt(put, name, "written")
