"""The bytes of one row of an index, in a tar on this machine."""

import os
from collections.abc import Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from datamodules.shards.index import ShardIndex


class OpenRow(Protocol):
    """A safetensors file."""

    def read(self, size: int, offset: int) -> bytes:
        """Up to so many bytes."""

    def read_into(self, buffers: Sequence[Any], offset: int) -> int:
        """Fill these buffers, one after the other; returns the number of bytes."""


class Tars(Protocol):
    """Opens rows, from any thread."""

    def name(self, index: ShardIndex, row: int) -> str:
        """The tar that holds a row, for messages."""

    def open(self, index: ShardIndex, row: int) -> OpenRow:
        """The row with this number."""


class LocalRow:
    """In a file of this machine, from which bytes are read straight into a batch."""

    def __init__(self, file: FileIO, start: int) -> None:
        self.file = file
        self.start = start

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self.file.fileno(), size, self.start + offset)

    def read_into(self, buffers: Sequence[Any], offset: int) -> int:
        return os.preadv(self.file.fileno(), buffers, self.start + offset)


class LocalTars:
    """Those of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A file that is evicted is closed once no thread reads from it.
        self._open = lru_cache(maxsize=128)(self._open_tar)

    def name(self, index: ShardIndex, row: int) -> str:
        return str(self.folder / index.shards[index.spans[3 * row]])

    def open(self, index: ShardIndex, row: int) -> LocalRow:
        shard, offset = index.spans[3 * row : 3 * row + 2]
        return LocalRow(self._open(index.shards[shard]), offset)

    def _open_tar(self, name: str) -> FileIO:
        return FileIO(self.folder / name)
