"""Where processes leave files for each other: a folder that all see, or one in a bucket."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from datamodules.errors import UserError
from datamodules.files import replacing

# Another process may drop a folder at any moment, which is then made again.
ATTEMPTS = 5


class Place(Protocol):
    """A flat folder of small files, and folders in it.

    Attributes:
        look: seconds between two looks at what others have left.
    """

    look: float

    def inner(self, name: str) -> "Place":
        """A folder in this one."""

    def names(self) -> Iterable[str]:
        """The files."""

    def folders(self) -> list[str]:
        """The folders."""

    def read(self, name: str) -> bytes | None:
        """A file; None if there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""

    def create(self, name: str, content: bytes) -> bool:
        """Make a file, unless there is one; of all that try only one does."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; some may not be there."""

    def drop(self, folder: str) -> None:
        """Remove a folder with its files."""


class Folder:
    """On a disk of this machine, or of a network."""

    look = 0.3

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def inner(self, name: str) -> "Folder":
        return Folder(self.path / name)

    def names(self) -> list[str]:
        return [path.name for path in self.path.glob("[!.]*")]

    def folders(self) -> list[str]:
        return [path.name for path in self.path.glob("*/")]

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        for left in reversed(range(ATTEMPTS)):
            try:
                with replacing(self.path / name) as temporary:
                    temporary.write_bytes(content)
                return
            except UserError as error:
                if not (left and isinstance(error.__cause__, FileNotFoundError)):
                    raise

    def create(self, name: str, content: bytes) -> bool:
        for left in reversed(range(ATTEMPTS)):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with (self.path / name).open("xb") as file:
                    file.write(content)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                if not left:
                    raise
        raise AssertionError

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def drop(self, folder: str) -> None:
        shutil.rmtree(self.path / folder, ignore_errors=True)
