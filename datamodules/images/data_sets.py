"""Data sets of Hugging Face: on the hub, in parquet or Arrow files, or saved on disk.

Arrow files are mapped into memory, and an image is read only when it is opened.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.errors import UserError, without_credentials
from datamodules.files import Packed, reason
from datamodules.images.tables import Table

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("retouch")

HUB = "hf://"
ARROW_SUFFIXES = (".parquet", ".arrow")
# Files that `save_to_disk` writes: of one data set, and of several splits.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
# Last bytes of a stream of Arrow batches.
END = b"\xff\xff\xff\xff\0\0\0\0"
_NAME = re.compile(
    r"hf://(datasets/)?(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^/#]+(/pr/\d+)?))?(/(?P<config>[^#@]+))?(#(?P<split>\w+))?"
)


@dataclass(frozen=True)
class Cell(Packed):
    """An image in a cell of an Arrow file.

    Attributes:
        place: the data set in messages; it does not identify the image, since a root can be spelled in several ways.
        file: the Arrow file.
        first: index of the file's first row in the data set.
        row: row in the file.
        column: column.
        position: position in a list of images; None for a cell with a single one.
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
        return _row_key(self.first + self.row)

    def __str__(self) -> str:
        position = "" if self.position is None else f"[{self.position}]"
        return f"{self.place} row {self.first + self.row} {self.column}{position}"


def _row_key(row: int) -> str:
    return f"{row:06d}"


def mark_of_data_set(folder: Path) -> Path | None:
    """Return the file that marks a data set: saved by `datasets`, or parquet or Arrow in the folder or its `data`."""
    saved = [folder / name for name in (SAVED, SAVED_SPLITS) if (folder / name).is_file()]
    files = (
        path
        for place in (folder, folder / "data")
        if place.is_dir()
        for path in sorted(place.iterdir())
        if path.suffix in ARROW_SUFFIXES and not path.name.startswith(".")
    )
    return next(iter(saved), None) or next(files, None)


def hub_table(root: str) -> Table:
    """Return a data set of the hub, `hf://owner/name@revision/config#split`; it is downloaded once.

    Raises:
        UserError: the data set does not exist, or cannot be downloaded.
    """
    match = _NAME.fullmatch(root)
    if match is None:
        raise UserError(
            f"data.root={root}: a data set of the hub is hf://owner/name, or hf://owner/name@revision/config#split"
        )
    return _table(f"data.root={root}", _files_of_hub(root, *match.group("name", "config", "revision", "split")), None)


@cache
def _files_of_hub(root: str, name: str, config: str | None, revision: str | None, split: str | None) -> list[str]:
    """Return the Arrow files of a data set; each process asks once, so a run sees one version."""
    place = f"data.root={root}"
    datasets = _library(place)
    log.info(f"reading {root}")
    with _one_line(place, f"see https://huggingface.co/datasets/{name}"):
        return _files(place, datasets.load_dataset(name, config, revision=revision), split)


def local_table(path: Path, split: str | None) -> Table:
    """Return a parquet or Arrow file, a folder of them, or one of `save_to_disk`.

    Raises:
        UserError: it cannot be read, or it has several splits and none of this name.
    """
    place = f"data.root={path}"
    # The path of a cell must not depend on the working folder; the target of a link may lack the suffix.
    path = Path(os.path.realpath(path)) if path.is_dir() else Path(os.path.realpath(path.parent), path.name)
    datasets = _library(place)
    with _one_line(place, "repair it, or copy it again"):
        if path.suffix == ".arrow" and path.is_file():
            files = [os.path.realpath(path)]
        elif not path.is_dir():
            files = _files(place, datasets.load_dataset("parquet", data_files=str(path)), split)
        elif any((path / name).is_file() for name in (SAVED, SAVED_SPLITS)):
            files = _files(place, datasets.load_from_disk(str(path)), split)
        else:
            files = _files(place, datasets.load_dataset(str(path)), split)
    return _table(place, files, path if path.is_dir() else path.parent)


def _files(place: str, found: Any, split: str | None) -> list[str]:
    """Return the Arrow files of the split of this name, else of `train` or the only one."""
    if isinstance(found, dict):
        name = split or ("train" if "train" in found else next(iter(found)))
        if name not in found or (split is None and name != "train" and len(found) > 1):
            there = f"its splits are {', '.join(found)}"
            problem = f"no split {split}" if split else "which split?"
            raise UserError(f"{place}: {problem}; {there}: name one after a #")
        found = found[name]
    elif split is not None:
        raise UserError(f"{place}: it has no splits, so no {split}: leave #{split} out")
    files = [os.path.realpath(file["filename"]) for file in found.cache_files]
    if (rows := sum(mapped(file).num_rows for file in files)) != len(found):
        raise UserError(f"{place}: its Arrow files have {rows} rows, not {len(found)}: save it again")
    return files


def _table(place: str, files: list[str], folder: Path | None) -> Table:
    """Return Arrow files as one table.

    Args:
        folder: folder of the files that texts name.
    """
    with _one_line(place, "repair it, or copy it again"):
        counts = [mapped(file).num_rows for file in files]
        if not sum(counts):
            raise ValueError("it has no rows")
        schema = mapped(files[0]).schema
    starts = list(accumulate(counts, initial=0))[:-1]
    shown = place.removeprefix("data.root=")

    def values(name: str) -> list[Any]:
        return [
            one for file, start in zip(files, starts, strict=True) for one in _cells(file, start, name, shown, folder)
        ]

    images = [column.name for column in schema if _holds_images(column.type)]
    return Table(
        place=place,
        rows=[f"row {row}" for row in range(sum(counts))],
        columns=schema.names,
        values=values,
        images=images,
        texts=[column.name for column in schema if "string" in str(column.type) and column.name not in images],
        folder=folder,
        keys=[_row_key(row) for row in range(sum(counts))],
    )


def _library(place: str) -> Any:
    """Import `datasets` without its progress bars and messages."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{place} needs the library datasets: pip install 'retouch[datasets]'") from error
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    return datasets


@contextlib.contextmanager
def _one_line(place: str, remedy: str) -> Iterator[None]:
    """Temporarily turn errors of `datasets` and Arrow into one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, OSError, ValueError, RuntimeError, TypeError, LookupError) as error:
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        raise UserError(f"{place}: {without_credentials(reason(cause)).rstrip('.')}; {remedy}") from error


def mapped(file: str) -> "pa.Table":
    """Return the table of an Arrow file; each process opens it once, and again after a change.

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
    if source.read() != END:  # a file cut between two batches would be a shorter table
        raise ValueError("it ends early")
    return table


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _holds_images(kind: "pa.DataType") -> bool:
    """Return whether a column is of bytes, of bytes with a path (the Image of `datasets`), or of lists of these."""
    import pyarrow as pa

    kind = kind.value_type if _is_list(kind) else kind
    if pa.types.is_struct(kind):
        return "bytes" in {member.name for member in kind}
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _cells(file: str, first: int, column: str, place: str, folder: Path | None) -> list[Any]:
    """Return the values of a column by row, without reading images.

    An image is a `Cell`, or the path of a file if the cell has only that; None is an empty cell.

    Args:
        first, place: see `Cell`.
        folder: folder that relative paths start from.
    """
    import pyarrow.compute as pc

    values = mapped(file)[column]
    if not _holds_images(values.type):
        return values.to_pylist()
    if not _is_list(values.type):
        cells = [Cell(place, file, first, row, column) for row in range(len(values))]
        return _filled(cells, values, folder)
    counts = pc.list_value_length(values).to_pylist()
    cells = [
        Cell(place, file, first, row, column, position)
        for row, count in enumerate(counts)
        for position in range(count or 0)
    ]
    found = iter(_filled(cells, pc.list_flatten(values), folder))
    return [None if count is None else [next(found) for _ in range(count)] for count in counts]


def _filled(cells: list[Cell], values: Any, folder: Path | None) -> list[Cell | str | None]:
    """Return each cell that holds bytes; of others the path, or None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    paths: list[str | None] = [None] * len(cells)
    if pa.types.is_struct(values.type):
        if "path" in {member.name for member in values.type}:
            paths = pc.struct_field(values, "path").to_pylist()
        values = pc.struct_field(values, "bytes")
    lengths = pc.binary_length(values).to_pylist()
    return [
        cell if length else path if path is None or folder is None else str(folder / path)
        for cell, length, path in zip(cells, lengths, paths, strict=True)
    ]
