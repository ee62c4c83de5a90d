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
import contextlib
import logging
import re
from functools import cache
from typing import TYPE_CHECKING

from datamodules.errors import UserError, without_credentials
from datamodules.files import reason
from datamodules.images.tables import Table

if TYPE_CHECKING:
    from datasets import Dataset


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


log = logging.getLogger("retouch")

HUB = "hf://"
SUFFIXES = (".parquet", ".arrow")
# What `save_to_disk` leaves: of one data set, and of several splits.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
_NAME = re.compile(
    r"hf://(datasets/)?(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^/#]+(/pr/\d+)?))?(/(?P<config>[^#@]+))?(#(?P<split>\w+))?"
)


def mark_of_data_set(folder: Path) -> Path | None:
    """What shows that a folder was saved by `datasets`, or has parquet or Arrow files in itself or in its `data`."""
    saved = [folder / name for name in (SAVED, SAVED_SPLITS) if (folder / name).is_file()]
    files = (
        path
        for place in (folder, folder / "data")
        if place.is_dir()
        for path in sorted(place.iterdir())
        if path.suffix in SUFFIXES and not path.name.startswith(".")
    )
    return next(iter(saved), None) or next(files, None)


def hub_table(root: str) -> Table:
    """A data set of the hub, `hf://owner/name`, `hf://owner/name@revision/config#split`; it is downloaded once.

    Raises:
        UserError: there is no such data set, or it cannot be had.
    """
    match = _NAME.fullmatch(root)
    if match is None:
        raise UserError(
            f"data.root={root}: a data set of the hub is hf://owner/name, or hf://owner/name@revision/config#split"
        )
    return _table(f"data.root={root}", _of_the_hub(root, *match.group("name", "config", "revision", "split")), None)


def local_table(path: Path, split: str | None) -> Table:
    """A parquet or Arrow file, a folder of them, or one of `save_to_disk`.

    Raises:
        UserError: it cannot be read, or it has several splits and none of this name.
    """
    place = f"data.root={path}"
    # A cell is known by its file, wherever a process stands; that of a link may have no suffix.
    path = Path(os.path.realpath(path)) if path.is_dir() else Path(os.path.realpath(path.parent), path.name)
    datasets = _library(place)
    folder = path if path.is_dir() else path.parent
    with _one_line(place, "repair it, or copy it again"):
        if path.suffix == ".arrow" and path.is_file():
            return _table(place, _Opened([os.path.realpath(path)], mapped(str(path)).num_rows), folder)
        if not path.is_dir():
            found = datasets.load_dataset("parquet", data_files=str(path))
        elif any((path / name).is_file() for name in (SAVED, SAVED_SPLITS)):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path))
        return _table(place, _Opened.of(_split(place, found, split)), folder)


@dataclass(frozen=True)
class _Opened:
    """Arrow files, in order, and how many rows they have together."""

    files: list[str]
    rows: int

    @classmethod
    def of(cls, data: "Dataset") -> "_Opened":
        return cls([os.path.realpath(file["filename"]) for file in data.cache_files], len(data))


@cache
def _of_the_hub(root: str, name: str, config: str | None, revision: str | None, split: str | None) -> _Opened:
    """In each process it is asked for once: a run's data does not change while it is being prepared."""
    place = f"data.root={root}"
    datasets = _library(place)
    log.info(f"reading {root}")
    with _one_line(place, f"see https://huggingface.co/datasets/{name}"):
        return _Opened.of(_split(place, datasets.load_dataset(name, config, revision=revision), split))


def _split(place: str, found: Any, split: str | None) -> "Dataset":
    """The data set of this name, else `train` or the only one."""
    if not isinstance(found, dict):
        if split is not None:
            raise UserError(f"{place}: it has no splits, so no {split}: leave #{split} out")
        return found
    name = split or ("train" if "train" in found else next(iter(found)))
    if name not in found or (split is None and name != "train" and len(found) > 1):
        there = f"its splits are {', '.join(found)}"
        raise UserError(f"{place}: {f'no split {split}' if split else 'which split?'}; {there}: name one behind a #")
    return found[name]


def _table(place: str, opened: _Opened, folder: Path | None) -> Table:
    with _one_line(place, "repair it, or copy it again"):
        tables = [mapped(file) for file in opened.files]
    counts = [table.num_rows for table in tables]
    rows = sum(counts)
    if not rows or rows != opened.rows:
        what = f"its Arrow files have {rows} rows, not {opened.rows}: save it again" if rows else "it has no rows"
        raise UserError(f"{place}: {what}")
    first = [sum(counts[:number]) for number in range(len(counts))]
    schema = tables[0].schema

    def values(name: str) -> list[Any]:
        files = zip(opened.files, first, strict=True)
        shown = place.removeprefix("data.root=")
        return [value for file, start in files for value in cells(file, start, name, shown, folder)]

    return Table(
        place=place,
        rows=[f"row {row}" for row in range(rows)],
        columns=schema.names,
        values=values,
        pictures=[field.name for field in schema if holds_pictures(field.type)],
        texts=[field.name for field in schema if holds_texts(field.type)],
        folder=folder,
        keys=[row_key(row) for row in range(rows)],
    )


def _library(place: str) -> Any:
    """`datasets`, silent; it is imported only where it is needed."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{place} needs the library datasets: pip install 'retouch[datasets]'") from error
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    return datasets


@contextlib.contextmanager
def _one_line(place: str, remedy: str) -> Iterator[None]:
    """Turns what `datasets` and Arrow raise into one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, OSError, ValueError, RuntimeError, TypeError, LookupError) as error:
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        raise UserError(f"{place}: {without_credentials(reason(cause)).rstrip('.')}; {remedy}") from error
