"""A folder in object storage: s3://, gs:// or az://."""

import hashlib
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from datamodules.errors import UserError, without_credentials
from datamodules.files import replacing
from datamodules.shards.failures import is_bucket_absent
from datamodules.shards.stores import kind_of, locate
from datamodules.shards.transfer import Attempts, DamagedError

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta, PutResult

Made = TypeVar("Made")
# What an object says of its content beside it.
CHECKSUM = "sha256"
# Of 5 MiB, uploaded at once. Few: each must have been sent within READ_TIMEOUT, on a slow line too.
PARTS = 2


class Bucket:
    """A folder in object storage.

    Args:
        url: of the folder.
        setting: that names it, for messages.

    Attributes:
        store: obstore's.
        prefix: of the names of all objects in the folder.
    """

    def __init__(self, url: str, setting: str) -> None:
        if kind_of(url) not in ("s3", "gs", "az"):
            raise UserError(f"{setting}={without_credentials(url)}: name a folder, or one in s3://, gs:// or az://")
        self.url = url
        self.setting = setting
        self._reached = False
        self.store, path = locate(url, setting)
        self.prefix = f"{path.strip('/')}/" if path.strip("/") else ""

    def __str__(self) -> str:
        return without_credentials(self.url)

    def attempt(self, work: Callable[[], Made], done: str = "read") -> Made:
        """What `work` makes, tried several times.

        Args:
            done: read or written, for messages.

        Raises:
            FileNotFoundError: there is no such object.
            UserError: there is no such bucket; or trying again would not help, or did not.
        """
        from obstore.exceptions import BaseError

        attempts = Attempts(self.url, self._reached, threading.Event(), self.setting, done)
        while True:
            try:
                made = work()
                self._reached = True
                return made
            except (BaseError, OSError, DamagedError) as error:
                if isinstance(error, FileNotFoundError) and not is_bucket_absent(error):
                    raise
                attempts.after(error)

    def names(self, deep: bool = False) -> "dict[str, ObjectMeta]":
        """The objects of the folder.

        Args:
            deep: with those of the folders in it.
        """
        import obstore

        def listed() -> "Iterable[ObjectMeta]":
            if deep:
                return obstore.list(self.store, self.prefix).collect()
            return obstore.list_with_delimiter(self.store, self.prefix)["objects"]

        found = {one["path"]: one for one in self.attempt(listed)}
        # S3's console makes an empty object of the name of a folder.
        folders = {str(folder) for path in (*found, f"{self.prefix}x") for folder in PurePosixPath(path).parents}
        return {path.removeprefix(self.prefix): one for path, one in found.items() if path not in folders}

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None if there is none."""
        import obstore

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
        """The sha256 of what was uploaded as an object; None where another program uploaded it.

        Raises:
            FileNotFoundError: there is no such object.
        """
        import obstore

        got = self.attempt(lambda: obstore.get(self.store, self.prefix + name, options={"head": True}))
        return got.attributes.get(CHECKSUM)

    def download(self, name: str, path: Path) -> None:
        """Replace a file by an object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        import obstore

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

    def write(self, name: str, path: Path) -> None:
        """Create or replace an object by a file."""

        def write() -> None:
            with path.open("rb") as file:
                self.put(name, file)

        self.attempt(write, "written")

    def put(self, name: str, content: bytes | BinaryIO) -> "PutResult":
        """Upload, trying once, with the checksum to which all that is read is held. Raises a BaseError of obstore."""
        import obstore

        if isinstance(content, bytes):
            digest = hashlib.sha256(content)
        else:
            digest = hashlib.file_digest(content, "sha256")  # type: ignore[arg-type]
            content.seek(0)
        checked = {CHECKSUM: digest.hexdigest()}
        path = self.prefix + name
        return obstore.put(self.store, path, content, attributes=checked, max_concurrency=PARTS)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects, trying once; some may not be there. Raises a BaseError of obstore."""
        import obstore

        if paths := [self.prefix + name for name in names]:
            try:
                obstore.delete(self.store, paths)
            except FileNotFoundError:  # Google's and Azure's stores stop at the first one that is not there
                for path in paths:
                    with suppress(FileNotFoundError):
                        obstore.delete(self.store, path)


def _compare(got: "GetResult", name: str, sha256: str) -> None:
    """Raise a DamagedError where an object is not what was uploaded; one of another program may have no checksum."""
    if got.attributes.get(CHECKSUM, sha256) != sha256:
        raise DamagedError(f"{name} is not what was uploaded")
