"""Data sets of Hugging Face: of the hub, of parquet or Arrow files, or saved on disk."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.errors import UserError, without_credentials
from datamodules.files import reason
from datamodules.images.cells import cells, holds_pictures, holds_texts, mapped, row_key
from datamodules.images.rows import Table

if TYPE_CHECKING:
    from datasets import Dataset

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
