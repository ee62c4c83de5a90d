"""Samples of a table, whatever it is stored as: each row a sample, each column what it is called."""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import Packed, read_text, reason, require_file
from datamodules.images.columns import Columns, MissingColumn, choose_columns, is_optional
from datamodules.images.folders import IMAGE_SUFFIXES, find_file
from datamodules.images.samples import Found, Picture, Root, Sample, TextFile, captions_of, lines_of, text_prompts

# Values of a column that are looked at, to see whether they name pictures.
FIRST = 100


@dataclass(frozen=True)
class Table:
    """A table to make samples of.

    Attributes:
        place: what messages call it.
        rows: what they call its rows.
        columns: the names of its columns.
        values: of a column, one for each row. Pictures are Packed, or texts, which name files below `folder`; control
            images may be lists of them. None where there is nothing.
        pictures: columns that hold pictures, to be preferred to those of texts.
        texts: columns that may name files.
        folder: of the files that texts name; None where texts name none.
        keys: of the samples; None for those of the targets' names.
        usual: names that a role's column has in such tables, before any guess.
        incomplete: a line about each row that could not be read.
        notes: a line about each thing that is not read.
    """

    place: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Callable[[str], Sequence[Any]]
    pictures: Sequence[str] = ()
    texts: Sequence[str] = ()
    folder: Path | None = None
    keys: Sequence[str] | None = None
    usual: Mapping[str, str] | None = None
    incomplete: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class _Incomplete(Exception):
    """What a row lacks."""


def samples_of(table: Table, root: Root, instance_prompts: tuple[str, ...] = (), edits: bool = True) -> Found:
    """The samples of a table, in its order.

    Args:
        instance_prompts: of pictures that have none; where it is empty, these are incomplete if the root requires one.
        edits: whether pairs are wanted, else pictures with captions.

    Raises:
        UserError: a column is missing, or holds what it cannot be.
    """
    columns = _columns(table, root, edits)
    names = (columns.target, columns.prompt, columns.mask, columns.rejected, *columns.controls)
    values = [table.values(name) if name is not None else [None] * len(table.rows) for name in names]
    samples, incomplete = [], list(table.incomplete)
    for number, (row, target, prompt, mask, rejected, *controls) in enumerate(zip(table.rows, *values, strict=True)):
        where = f"{table.place} {row}"
        try:
            sample = Sample(
                key="" if table.keys is None else table.keys[number],
                target=_picture(table, where, columns.target, target),
                controls=_controls(table, where, columns.controls, controls),
                prompts=_prompts(where, columns.prompt, prompt, root, instance_prompts),
                mask=None if mask in (None, "") else _picture(table, where, str(columns.mask), mask),
                rejected=None if rejected in (None, "") else _picture(table, where, str(columns.rejected), rejected),
            )
        except _Incomplete as error:
            incomplete.append(f"{where}: {error}")
        else:
            samples.append(replace(sample, key=sample.key or str(Path(target).with_suffix(""))))
    if len({sample.key for sample in samples}) < len(samples):  # one picture with several instructions
        samples = [replace(sample, key=f"{sample.key}#{number}") for number, sample in enumerate(samples, 1)]
    *_, pictures = _columns_of_pictures(table)
    unread = [name for name in dict.fromkeys(pictures) if name not in names]
    more = (f"{table.place}: images of other columns are not read: {listing(unread)}",) if unread else ()
    return Found(samples, incomplete, forms=("columns",), notes=table.notes + more)


def _columns(table: Table, root: Root, edits: bool) -> Columns:
    wanted = ["target", *(["control"] if edits else []), *(["prompt"] if edits and root.require_prompt else [])]
    missing: MissingColumn | None = None
    for pictures in _columns_of_pictures(table):
        try:
            return choose_columns(table.place, table.columns, pictures, root.columns, wanted, table.usual)
        except MissingColumn as error:
            missing = error
    assert missing is not None
    raise missing


def _columns_of_pictures(table: Table) -> Iterator[Sequence[str]]:
    """Those that hold pictures, then those that name files, too, and last those that name missing ones."""
    if table.pictures or table.folder is None:
        yield table.pictures
    if (folder := table.folder) is None:
        return
    names = {name: _file_names(table.values(name)) for name in table.texts}
    files = [name for name, some in names.items() if any(os.path.isfile(find_file(folder, one)) for one in some)]
    lost = [name for name, some in names.items() if name not in files and any(map(_is_like_a_picture, some))]
    yield [*table.pictures, *files, *filter(is_optional, lost)]  # not wanted, and never missed
    yield [*table.pictures, *files, *lost]


def _file_names(values: Sequence[Any]) -> list[str]:
    """The first names that a column holds, if it holds names."""
    filled = (value for value in values if value not in (None, "", []))
    return [one for value in islice(filled, FIRST) for one in _several(value) if isinstance(one, str)]


def _several(value: Any) -> list[Any]:
    try:
        value = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    except json.JSONDecodeError:
        return []
    return value if isinstance(value, list) else [value]


def _is_like_a_picture(name: str) -> bool:
    return "://" not in name and Path(name).suffix.lower() in IMAGE_SUFFIXES


def _controls(table: Table, where: str, names: Sequence[str], values: Sequence[Any]) -> tuple[Picture, ...]:
    """Of all columns; only the first must have one, as samples may have different numbers of references."""
    found: list[Picture] = []
    for name, value in zip(names, values, strict=True):
        value = _listed(where, name, value)
        if not value and name == names[0]:
            raise _Incomplete(f"{name} is empty")
        found += [_picture(table, where, name, one) for one in value]
    return tuple(found)


def _listed(where: str, name: str, value: Any) -> list[Any]:
    """One picture, or several as a list (in CSV: a JSON list)."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f'{where}: {name}={value}: several are written as ["a.png", "b.png"]') from error
    value = value if isinstance(value, list) else [] if value is None else [value]
    if not all(one is None or isinstance(one, str | Packed) for one in value):
        raise UserError(f"{where}: {name}={value}: must be a picture or a list of them")
    return [one for one in value if one != ""]


def _picture(table: Table, where: str, name: str, value: Any) -> Picture:
    if value is None or value == "":
        raise _Incomplete(f"{name} is empty")
    if isinstance(value, Packed):
        return value
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be text, the name of a file")
    path = find_file(table.folder or Path(), value)
    if not os.path.isfile(path):
        raise _Incomplete(_why_absent(path))
    return path


def _why_absent(path: Path) -> str:
    try:
        require_file(path)
    except FileNotFoundError as error:
        return f"{path} does not exist" if not path.is_symlink() else f"{path}: {error.strerror}"
    except (OSError, ValueError) as error:
        return f"{path}: {reason(error)}"
    return f"{path} does not exist"


def _prompts(
    where: str, name: str | None, value: Any, root: Root, instance_prompts: tuple[str, ...]
) -> tuple[str, ...]:
    """Of a row; missing ones are the instance prompts, where there are such things."""
    if value is None or value == []:
        if root.require_prompt and not instance_prompts:
            raise _Incomplete(f"{name} is empty")
        return instance_prompts
    if isinstance(value, TextFile):
        prompts = text_prompts(value, root.caption_per_line)
    elif (found := captions_of(value)) is not None:
        prompts = found
    else:
        raise UserError(f"{where}: {name} must be text, or a list of texts")
    try:
        "".join(prompts).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {name} holds an incomplete character, {error.object[error.start]!r}") from error
    return prompts if root.require_prompt or any(prompts) else ()


# What a folder's table is called.
TABLES = ("metadata.jsonl", "metadata.csv")
# What the columns of a table of ours are called; others are guessed.
COLUMNS = {
    **{"target": "file_name", "control": "control_file_name", "prompt": "prompt"},
    **{"mask": "mask_file_name", "rejected": "rejected_file_name"},
}


def file_table(path: Path) -> Table:
    """A table whose file names are relative to its folder.

    Columns: file_name, control_file_name (one name, or a JSON list), prompt (a text, in JSON lines also a list), and
    optionally mask_file_name and rejected_file_name; or such as `choose_columns` guesses.

    Raises:
        UserError: as `read_table`, or it has no rows.
    """
    rows = read_table(path)
    if not rows:
        raise UserError(f"{path} has no rows")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return Table(
        place=str(path),
        rows=[f"row {number}" for number in range(1, len(rows) + 1)],
        columns=columns,
        texts=columns,
        values=lambda name: [row.get(name) for row in rows],
        folder=path.parent,
        usual=COLUMNS,
    )


def read_table(table: Path) -> list[dict[str, Any]]:
    """The rows as dicts by column; values are text in CSV, and any JSON value in JSON lines.

    Raises:
        UserError: it is malformed, or its quotes leave in doubt where a value ends.
    """
    text = read_text(table)
    return list(_csv_rows(table, text) if table.suffix == ".csv" else _json_rows(table, text))


def _csv_rows(table: Path, text: str) -> Iterator[dict[str, Any]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    columns: list[str] = []
    line = 1
    try:
        for values in reader:
            first, line = line, reader.line_num + 1
            if not any(values):  # spreadsheets write empty rows
                continue
            if not columns:
                columns = values
                _once(table, columns)
                continue
            if len(values) != len(columns):
                raise UserError(
                    f"{table} line {first}: {len(values)} values for {len(columns)} columns ({', '.join(columns)}); a "
                    "prompt with a comma needs quotes"
                )
            if swallowed := _swallowed_row(table, values):
                raise UserError(
                    f"{table} line {first}: a quote is left open, so its prompt includes the row of {swallowed}"
                )
            yield dict(zip(columns, values, strict=True))
    except csv.Error as error:
        raise UserError(f"{table} line {line}: a quote is left open, or not doubled, in this row ({error})") from error


def _swallowed_row(table: Path, values: list[str]) -> str | None:
    """The image file named at the start of a line inside a value: a quote left open has swallowed its row."""
    names = [line.partition(",")[0] for value in values for line in lines_of(value)[1:] if "," in line]
    return next((name for name in names if name and os.path.isfile(table.parent / name)), None)


def _json_rows(table: Path, text: str) -> Iterator[dict[str, Any]]:
    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _once(table, [name for name, _ in pairs])
        return dict(pairs)

    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=read)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{table} line {number} is not JSON: {getattr(error, 'msg', error)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{table} line {number} is not an object of columns")
        yield row


def _once(table: Path, columns: list[str]) -> None:
    if repeated := [name for name, count in Counter(columns).items() if count > 1]:
        raise UserError(f"{table} has the column {listing(repeated)} twice")
