"""Data sets of Hugging Face: on the hub, in parquet or Arrow files, or saved on disk.

Arrow files are mapped into memory, and an image is read only when it is opened.
"""

import contextlib
import glob
import json
import logging
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.images.tables import Table, names_images
from foundation.errors import UserError, without_credentials
from foundation.files import Packed, file_signature, is_below, read_text, reason, require_file

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


def mark_of_data_set(folder: Path) -> Path | None:
    """Return the file that marks a data set: saved by `datasets`, or parquet or Arrow in the folder or its `data`."""
    places = [f"{place}[!.]*{suffix}" for place in ("", "data/") for suffix in ARROW_SUFFIXES]
    found = (path for pattern in (SAVED, SAVED_SPLITS, *places) for path in sorted(folder.glob(pattern)))
    return next(found, None)


@cache
def hub_table(root: str) -> Table:
    """Return a data set of the hub, `hf://owner/name@revision/config#split`; a process asks for it once.

    Raises:
        UserError: the data set does not exist, or cannot be downloaded.
    """
    place = f"data.root={root}"
    match = _NAME.fullmatch(root)
    if match is None:
        raise UserError(f"{place}: a data set of the hub is hf://owner/name, or hf://owner/name@revision/config#split")
    name, config, revision, split = match.group("name", "config", "revision", "split")
    datasets = _library(place)
    log.info(f"reading {root}")
    with _one_line(place, f"see https://huggingface.co/datasets/{name}"):
        found = datasets.load_dataset(name, config, revision=revision)
        files = found[_chosen(place, found, split)].cache_files
    return _table(place, [os.path.realpath(file["filename"]) for file in files], None)


def local_table(path: Path, split: str | None) -> Table:
    """Return a parquet or Arrow file, a folder of them, or one of `save_to_disk`.

    Files are found by their names: nothing beside them names others, and nothing is asked of a network.

    Raises:
        UserError: it cannot be read, it lacks this split, or a file in its folder is a link to another place.
    """
    place = f"data.root={path}"
    # The path of a cell must not depend on the working folder; the target of a link may lack the suffix.
    path = Path(os.path.realpath(path)) if path.is_dir() else Path(os.path.realpath(path.parent), path.name)
    datasets = _library(place)
    with _one_line(place):
        if not path.is_dir():
            files = [str(path)]
        elif (path / SAVED_SPLITS).is_file():
            names = sorted(found.parent.name for found in path.glob(f"*/{SAVED}"))
            files = _saved(path, _chosen(place, names, split))
        elif (path / SAVED).is_file():
            if split is not None:
                raise UserError(f"{place}: it has no splits, so no {split}: leave #{split} out")
            files = _saved(path, "")
        else:
            splits = _by_split(path)
            files = [_inside(path, file) for file in splits[_chosen(place, splits, split)]]
        if files[0].endswith(".parquet"):
            table = datasets.Dataset.from_parquet([glob.escape(file) for file in files])
            files = [file["filename"] for file in table.cache_files]
    return _table(place, list(map(os.path.realpath, files)), path if path.is_dir() else path.parent)


def _inside(folder: Path, name: str) -> str:
    """Return the path of a file in a folder; raise a UserError if it is elsewhere, also by a link."""
    require_file(folder / name)
    if not is_below(folder / name, folder):
        raise UserError(f"data.root={folder}: {name} is in another place. Copy it into the folder, or name that place")
    return str(folder / name)


def _saved(folder: Path, split: str) -> list[str]:
    """Return the Arrow files of a data set that `save_to_disk` has written, of a split in its folder."""
    state = json.loads(read_text(Path(_inside(folder, os.path.join(split, SAVED)))))
    return [_inside(folder, os.path.join(split, one["filename"])) for one in state["_data_files"]]


def _by_split(folder: Path) -> dict[str, list[str]]:
    """Return the parquet or Arrow files in a folder by their splits, which their names say as on the hub."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    mark, base = mark_of_data_set(folder), glob.escape(str(folder))
    return DataFilesDict.from_patterns(get_data_patterns(base), base, [mark.suffix] if mark else [*ARROW_SUFFIXES])


def _chosen(place: str, splits: Collection[str], split: str | None) -> str:
    """Return the split of this name, else `train` or the only one."""
    name = split or ("train" if "train" in splits else next(iter(splits), "train"))
    if name not in splits or (split is None and name != "train" and len(splits) > 1):
        problem = f"no split {split}" if split else "which split?"
        raise UserError(f"{place}: {problem}; its splits are {', '.join(splits) or 'missing'}: name one after a #")
    return name


def _table(place: str, files: list[str], folder: Path | None) -> Table:
    """Return Arrow files as one table; texts may name files in `folder`."""
    with _one_line(place):
        count = sum(_mapped(file).num_rows for file in files)
        if not count:
            raise ValueError("it has no rows")
        schema = _mapped(files[0]).schema

    def values(name: str) -> list[Any]:
        with _one_line(place):
            return _cells(place.removeprefix("data.root="), files, name, folder)

    def holds_images(column: "pa.Field") -> bool:
        names_files = folder is not None and "string" in str(column.type)
        return _holds_images(column.type) or (names_files and names_images(values(column.name)))

    return Table(
        place=place,
        rows=[f"row {row}" for row in range(count)],
        columns=schema.names,
        values=values,
        images=[column.name for column in schema if holds_images(column)],
        folder=folder,
        closed=True,
        keys=[f"{row:06d}" for row in range(count)],
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
def _one_line(place: str, remedy: str = "repair it, or copy it again") -> Iterator[None]:
    """Temporarily turn errors of `datasets` and Arrow into one line."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, OSError, ValueError, RuntimeError, TypeError, LookupError) as error:
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        raise UserError(f"{place}: {without_credentials(reason(cause)).rstrip('.')}; {remedy}") from error


def _mapped(file: str) -> "pa.Table":
    """Return the table of an Arrow file, mapped into memory.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return _mapped_at(file, os.stat(file).st_mtime_ns)


@lru_cache(maxsize=256)
def _mapped_at(file: str, modified: int) -> "pa.Table":
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False)  # data workers are forks
    try:
        table = pa.ipc.open_stream(pa.memory_map(file), options=options).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(pa.memory_map(file), options=options).read_all()
    with open(file, "rb") as whole:
        whole.seek(-len(END), os.SEEK_END)
        if whole.read() != END:  # cut between two batches
            raise ValueError("it ends early")
    return table


def _holds_images(kind: "pa.DataType") -> bool:
    """Return whether a column is of bytes, of bytes with a path (the Image of `datasets`), or of lists of these."""
    import pyarrow as pa

    kind = getattr(kind, "value_type", kind)
    if pa.types.is_struct(kind):
        return "bytes" in {member.name for member in kind}
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


@dataclass(frozen=True)
class Cell(Packed):
    """An image in a cell of an Arrow file.

    Attributes:
        name: its name in messages.
        file: path of the file, without links.
        column, row: position in the file.
        item: index in the list of a cell; None for a cell of one image.
    """

    name: str = field(compare=False)
    file: str
    column: str
    row: int
    item: int | None = None

    def read_bytes(self) -> bytes:
        cell = _mapped(self.file)[self.column][self.row]
        cell = cell if self.item is None else cell.values[self.item]
        return (cell["bytes"] if hasattr(cell, "keys") else cell).as_py()

    def signature(self) -> tuple[str, int, int, int]:
        _, size, modified, changed = file_signature(Path(self.file))
        return f"{self.file}#{self.column}.{self.row}.{self.item}", size, modified, changed

    def __str__(self) -> str:
        return self.name


def _cells(place: str, files: list[str], column: str, folder: Path | None) -> list[Any]:
    """Return the values of a column by row, without reading images; None is an empty cell."""
    found: list[Any] = []
    for file in files:
        values = _mapped(file)[column]
        if not _holds_images(values.type):
            found += values.to_pylist()
            continue
        for row, cell in enumerate(values):
            where = Cell(f"{place} row {len(found)} {column}", file, column, row)
            if cell.is_valid and hasattr(values.type, "value_type"):
                items = [replace(where, name=f"{where}[{index}]", item=index) for index in range(len(cell))]
                found.append([_image(one, item, folder) for one, item in zip(cell, items, strict=True)])
            else:
                found.append(_image(cell, where, folder))
    return found


def _image(cell: Any, where: Cell, folder: Path | None) -> Cell | str | None:
    """Return the place of an image; without bytes its path below `folder`, or None."""
    if not cell.is_valid:
        return None
    content, path = (cell["bytes"], cell.get("path")) if hasattr(cell, "keys") else (cell, None)
    if content.is_valid and content.as_buffer().size:
        return where
    name = None if path is None else path.as_py()
    return name if name is None or folder is None else str(folder / name)
