"""Data sets of Hugging Face: on the hub, in parquet or Arrow files, or saved on disk.

Arrow files are mapped into memory, and an image is read only when it is opened.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datamodules.errors import UserError, without_credentials
from datamodules.files import reason
from datamodules.images.samples import Slice
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
            problem = f"no split {split}" if split else "which split?"
            raise UserError(f"{place}: {problem}; its splits are {', '.join(found)}: name one after a #")
        found = found[name]
    elif split is not None:
        raise UserError(f"{place}: it has no splits, so no {split}: leave #{split} out")
    files = [os.path.realpath(file["filename"]) for file in found.cache_files]
    if (rows := sum(_mapped(file)[0].num_rows for file in files)) != len(found):
        raise UserError(f"{place}: its Arrow files have {rows} rows, not {len(found)}: save it again")
    return files


def _table(place: str, files: list[str], folder: Path | None) -> Table:
    """Return Arrow files as one table; `folder` is that of the files that texts name."""
    with _one_line(place, "repair it, or copy it again"):
        counts = [_mapped(file)[0].num_rows for file in files]
        if not sum(counts):
            raise ValueError("it has no rows")
        schema = _mapped(files[0])[0].schema

    def values(name: str) -> list[Any]:
        with _one_line(place, "repair it, or copy it again"):
            return _cells(place.removeprefix("data.root="), files, name, folder)

    images = [column.name for column in schema if _holds_images(column.type)]
    return Table(
        place=place,
        rows=[f"row {row}" for row in range(sum(counts))],
        columns=schema.names,
        values=values,
        images=images,
        texts=[column.name for column in schema if "string" in str(column.type) and column.name not in images],
        folder=folder,
        keys=[f"{row:06d}" for row in range(sum(counts))],
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


def _mapped(file: str) -> tuple["pa.Table", int]:
    """Return the table of an Arrow file, mapped into memory, and the address of the file's first byte.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return _mapped_at(file, os.stat(file).st_mtime_ns)


@lru_cache(maxsize=256)
def _mapped_at(file: str, modified: int) -> tuple["pa.Table", int]:
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(use_threads=False)  # data workers are forks
    source = pa.memory_map(file)
    whole = source.read_buffer()
    source.seek(0)
    try:
        table = pa.ipc.open_stream(source, options=options).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source, options=options).read_all(), whole.address
    if whole.slice(max(0, whole.size - len(END))).to_pybytes() != END:  # a file cut between two batches
        raise ValueError("it ends early")
    return table, whole.address


def _holds_images(kind: "pa.DataType") -> bool:
    """Return whether a column is of bytes, of bytes with a path (the Image of `datasets`), or of lists of these."""
    import pyarrow as pa

    kind = getattr(kind, "value_type", kind)
    if pa.types.is_struct(kind):
        return "bytes" in {member.name for member in kind}
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _cells(place: str, files: list[str], column: str, folder: Path | None) -> list[Any]:
    """Return the values of a column by row, without reading images; None is an empty cell.

    Raises:
        ValueError: a file is compressed.
    """
    found: list[Any] = []
    for file in files:
        table, address = _mapped(file)
        for chunk in table[column].chunks:
            first = len(found)
            if not _holds_images(chunk.type):
                found += chunk.to_pylist()
            elif hasattr(chunk.type, "value_type"):
                counts = chunk.value_lengths().to_pylist()
                names = [
                    f"{place} row {first + row} {column}[{i}]" for row, n in enumerate(counts) for i in range(n or 0)
                ]
                images = iter(_images(file, address, chunk.flatten(), names, folder))
                found += [None if count is None else [next(images) for _ in range(count)] for count in counts]
            else:
                names = [f"{place} row {first + row} {column}" for row in range(len(chunk))]
                found += _images(file, address, chunk, names, folder)
    return found


def _images(file: str, address: int, array: Any, names: list[str], folder: Path | None) -> list[Slice | str | None]:
    """Return each image of an array of `_holds_images` as a part of its file; without bytes its path, or None.

    Args:
        address: address of the file's first byte.
    """
    import pyarrow as pa

    paths: list[str | None] = [None] * len(array)
    valid = array.is_valid().to_pylist()
    if pa.types.is_struct(array.type):
        if "path" in {member.name for member in array.type}:
            paths = array.field("path").to_pylist()
        array = array.field("bytes")
    _, offsets, content = array.buffers()
    if content is None:
        return [_below(folder, path) for path in paths]
    width = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    ends = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1].tolist()
    start = content.address - address
    if ends[-1] > ends[0] and not 0 <= start <= os.path.getsize(file) - ends[-1]:
        raise ValueError("it is compressed: save it without compression")
    return [
        Slice(name, file, start + begin, end - begin) if there and end > begin else _below(folder, path)
        for name, begin, end, there, path in zip(names, ends, ends[1:], valid, paths, strict=False)
    ]


def _below(folder: Path | None, path: str | None) -> str | None:
    return path if path is None or folder is None else str(folder / path)
