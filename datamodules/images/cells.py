"""Pictures in the cells of Arrow files, which are mapped into memory: none is read before it is asked for."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datamodules.files import Packed

if TYPE_CHECKING:
    import pyarrow as pa


# The last bytes of a stream of Arrow batches.
END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class Cell(Packed):
    """A picture in a cell.

    Attributes:
        place: the data set, as messages call it; the same picture has several, by how its root is written.
        file: the Arrow file.
        first: the number of the file's first row in the data set, for messages and names.
        row: its row in the file.
        column: its column.
        position: in a list of pictures; None for a cell with a single one.
    """

    place: str = field(compare=False)
    file: str
    first: int = field(compare=False)
    row: int
    column: str
    position: int | None = None

    def read(self) -> bytes:
        value = mapped(self.file)[self.column][self.row]
        if self.position is not None:
            value = value.values[self.position]
        value = value.as_py()
        return value["bytes"] if isinstance(value, dict) else value

    def signature(self) -> tuple[str, int, int, int]:
        stat = os.stat(self.file)
        name = f"{self.file}#{self.row}.{self.column}.{self.position}"
        return name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

    @property
    def stem(self) -> str:
        return row_key(self.first + self.row)

    def __str__(self) -> str:
        number = "" if self.position is None else f"[{self.position}]"
        return f"{self.place} row {self.first + self.row} {self.column}{number}"


def row_key(row: int) -> str:
    """The name of a row's sample."""
    return f"{row:06d}"


def mapped(file: str) -> "pa.Table":
    """The table of an Arrow file; in each process it is opened once, and again when it has changed.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    stat = os.stat(file)
    return _mapped(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _mapped(file: str, size: int, modified: int) -> "pa.Table":
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False)  # data workers are forks
    source = pa.memory_map(file)
    try:
        table = pa.ipc.open_stream(source, options=options).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source, options=options).read_all()
    source.seek(max(0, size - len(END)))
    if source.read() != END:  # cut between two batches it would be a shorter table
        raise ValueError("it ends early")
    return table


def holds_pictures(kind: "pa.DataType") -> bool:
    """Whether a column is of bytes, of bytes with a path (the Image of `datasets`), or of lists of these."""
    import pyarrow as pa

    if _is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return "bytes" in {field.name for field in kind}
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def holds_texts(kind: "pa.DataType") -> bool:
    """Whether a column is of texts, or of lists of them."""
    import pyarrow as pa

    kind = kind.value_type if _is_list(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def cells(file: str, first: int, column: str, place: str, folder: Path | None) -> list[Any]:
    """The values of a column, by row, without reading pictures.

    A picture is a `Cell`, or the path of a file where the cell has only that; lists are lists of them. None is nothing.

    Args:
        folder: where paths start that are relative.
    """
    import pyarrow.compute as pc

    values = mapped(file)[column]
    if not holds_pictures(values.type):
        return values.to_pylist()

    def picture(mark: Literal[True] | str | None, row: int, position: int | None = None) -> Cell | str | None:
        if mark is True:
            return Cell(place, file, first, row, column, position)
        return mark if mark is None or folder is None else str(folder / mark)

    if not _is_list(values.type):
        return [picture(mark, row) for row, mark in enumerate(_marks(values))]
    marks = _marks(pc.list_flatten(values))
    counts = pc.list_value_length(values).to_pylist()
    return [
        None if count is None else [picture(next(marks), row, position) for position in range(count)]
        for row, count in enumerate(counts)
    ]


def _marks(values: Any) -> Iterator[Literal[True] | str | None]:
    """For each picture: True where its bytes are there, else the path that is there instead, if any."""
    import pyarrow as pa
    import pyarrow.compute as pc

    paths: list[str | None] = [None] * len(values)
    if pa.types.is_struct(values.type):
        if "path" in {field.name for field in values.type}:
            paths = pc.struct_field(values, "path").to_pylist()
        values = pc.struct_field(values, "bytes")
    lengths = pc.binary_length(values).to_pylist()
    for length, path in zip(lengths, paths, strict=True):
        yield True if length else path


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
