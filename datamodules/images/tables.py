"""Tables of samples: each row is a sample, each column a role, whether it is stored as text, Arrow or tars."""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from datamodules.images.captions import captions_of
from datamodules.images.folders import IMAGE_SUFFIXES, is_image
from datamodules.images.samples import CAPTION_SUFFIXES, Found, ImageFile, Root, Sample
from foundation.errors import UserError, listing
from foundation.files import Packed, read_text, reason, require_file

# Names of a folder's table.
TABLES = ("metadata.jsonl", "metadata.csv")
# Our own column names. Others are guessed.
COLUMNS = {
    **{"target": "file_name", "control": "control_file_name", "prompt": "prompt"},
    **{"mask": "mask_file_name", "rejected": "rejected_file_name"},
}
# Column names of each role, the likeliest first. "source", "source_image", "source_file_name" and "Source Images" are
# one word.
WORDS = {
    role: tuple(words.split())
    for role, words in {
        "control": "control source src input original before conditioning condition cond reference references ref refs "
        "start",
        "target": "target tgt edited output after result end chosen preferred image images img picture photo file_name "
        "file filename path jpg jpeg png webp",
        "prompt": "txt edit_prompt edit_instruction editing_instruction instruction instructions prompt prompts "
        "captions caption text description edit json",
        "mask": "mask",
        "rejected": "rejected dispreferred",
    }.items()
}
NOUNS = {"control": "column of condition images", "target": "column of targets", "prompt": "column of prompts"}
# Number of values by which a column is judged to name images.
FIRST = 100
_ENDINGS = re.compile(r"_?(file_?names?|files?|paths?|images?|imgs?|pictures?|photos?)$")
_NUMBER = re.compile(r"_?(\d+)$")


@dataclass(frozen=True)
class Table:
    """A table to read samples from.

    Attributes:
        place, rows: its name and its rows' names in messages.
        values: returns the values of a column by row: a Packed image; a text, which may name a file below `folder`; a
            list of these; or None.
        images: columns of images.
        texts: columns that may name files in `folder`; none do if it is None.
        keys: keys of the samples; None for the names of the targets.
        named: column names by role that need no guess.
        incomplete: a line about each row that could not be read.
    """

    place: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Callable[[str], Sequence[Any]]
    images: Sequence[str] = ()
    texts: Sequence[str] = ()
    folder: Path | None = None
    keys: Sequence[str] | None = None
    named: Mapping[str, list[str]] = field(default_factory=dict)
    incomplete: Sequence[str] = ()


def samples_of(table: Table, root: Root, edits: bool = True) -> Found:
    """Return the samples of a table, in its order.

    Args:
        edits: read pairs, not images with captions. Rows without a caption are incomplete if the root requires one.

    Raises:
        UserError: a column is missing or ambiguous.
    """
    require_prompt = edits and root.require_prompt
    wanted = ["target", *(["control"] if edits else []), *(["prompt"] if require_prompt else [])]
    images = [*table.images, *(name for name in table.texts if table.folder and _names_files(table, name))]
    taken = [name for value in root.columns.values() for name in (value if isinstance(value, list) else [value])]
    named = {role: [name for name in names if name not in taken] for role, names in table.named.items()}
    roles = choose_columns(table.place, table.columns, images, named | dict(root.columns), wanted)
    if not edits and roles["control"] and "target" not in root.columns:
        raise UserError(
            f"{table.place} is a set of pairs, for data=cached and a model that edits; data=captions takes images "
            f"alone: name the column, as data.columns='{{target: {roles['target'][0]}}}'"
        )
    if not edits:
        roles["control"] = []
    values = {name: table.values(name) for names in roles.values() for name in names}
    samples: list[Sample] = []
    incomplete = list(table.incomplete)
    for number, row in enumerate(table.rows):
        cells = {role: [(name, values[name][number]) for name in names] for role, names in roles.items()}
        try:
            sample = _sample(table.folder or Path(), cells, require_prompt)
        except UserError as error:
            incomplete.append(f"{table.place} {row}: {error}")
            continue
        if not root.require_prompt and not any(sample.prompts):
            sample = replace(sample, prompts=())
        key = str(Path(cells["target"][0][1]).with_suffix("")) if table.keys is None else table.keys[number]
        samples.append(replace(sample, key=key))
    if len({sample.key for sample in samples}) < len(samples):  # one image with several instructions
        samples = [replace(sample, key=f"{sample.key}#{number}") for number, sample in enumerate(samples, 1)]
    unread = [name for name in images if name not in values]
    notes = (f"{table.place}: images of other columns are not read: {listing(unread)}",) if unread else ()
    return Found(samples, incomplete, notes, "columns")


def _sample(folder: Path, cells: Mapping[str, Sequence[tuple[str, Any]]], require_prompt: bool) -> Sample:
    """Return the sample of a row.

    Args:
        folder: folder of the files that texts name.
        cells: the columns of each role, and their values in the row.

    Raises:
        UserError: an image or a caption is missing, or a value has a wrong type.
    """
    images: dict[str, list[ImageFile]] = {}
    for role in ("target", "control", "mask", "rejected"):
        found = [_images(folder, name, value) for name, value in cells[role]]
        # Samples may have different numbers of condition images: the last of their columns may be empty, or all.
        if found and not found[0] and (role == "target" or (role == "control" and any(found))):
            raise UserError(f"{cells[role][0][0]} is empty")
        images[role] = [image for some in found for image in some]
        if role != "control" and len(images[role]) > 1:
            raise UserError(f"{cells[role][0][0]} must be one image, not a list")
    prompts: tuple[str, ...] = ()
    for name, value in cells["prompt"]:
        prompts = _prompts(name, value)
        if require_prompt and not prompts:
            raise UserError(f"{name} is empty")
    mask, rejected = (next(iter(images[role]), None) for role in ("mask", "rejected"))
    return Sample("", images["target"][0], tuple(images["control"]), prompts, mask, rejected)


def _names_files(table: Table, name: str) -> bool:
    """Return whether the texts of a column are names of existing files, or of images that may be missing."""
    some = [one for value in islice(filter(None, table.values(name)), FIRST) for one in _parsed(value)]
    return any(
        os.path.isfile((table.folder or Path()) / one) or ("://" not in one and is_image(one))
        for one in some
        if isinstance(one, str)
    )


def _parsed(value: Any) -> list[Any]:
    """Return one or several values as a list; a text may be a JSON list."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return []
    return value if isinstance(value, list) else [value]


def _images(folder: Path, name: str, value: Any) -> list[ImageFile]:
    """Return the images of a cell: one, or several as a list (in CSV: a JSON list)."""
    values = [] if value in (None, "", []) else _parsed(value)
    if value and not values:
        raise UserError(f'{name}={value}: several images must be written as ["a.png", "b.png"]')
    if None in values:
        raise UserError(f"{name} is empty")
    found: list[ImageFile] = []
    for one in values:
        if isinstance(one, str):
            path = folder / one
            try:
                require_file(path)
            except (OSError, ValueError) as error:
                raise UserError(f"{path}: {reason(error)}") from error
            found.append(path)
        elif isinstance(one, Packed):
            found.append(one)
        else:
            raise UserError(f"{name}={value}: must be an image or a list of images")
    return found


def _prompts(name: str, value: Any) -> tuple[str, ...]:
    prompts = () if value in (None, []) else captions_of(value)
    if prompts is None:
        raise UserError(f"{name} must be text, or a list of texts")
    return prompts


# The columns of a table by role.


def choose_columns(
    place: str, columns: Sequence[str], images: Sequence[str], named: Mapping[str, Any], wanted: Sequence[str]
) -> dict[str, list[str]]:
    """Return the columns of each role of `WORDS`: as named, or guessed. Only controls may have several.

    Args:
        named: for a role its column; for control also a list.
        wanted: roles that must have a column.

    Raises:
        UserError: a wanted column is missing, two are equally likely, or a named one does not exist.
    """
    there = f"its columns are {', '.join(columns)}"
    if unknown := [str(role) for role in named if role not in WORDS]:
        raise UserError(f"data.columns: there is no {listing(unknown)}; choose from {', '.join(WORDS)}")
    found: dict[str, list[str]] = {}
    for role in WORDS:
        value = named.get(role)
        names = [] if value in (None, "", []) else list(value) if isinstance(value, list | tuple) else [value]
        if len(names) > 1 and role != "control":
            raise UserError(f"data.columns.{role}={listing(list(map(str, names)))}: only control may have several")
        if absent := [str(name) for name in names if name not in columns]:
            raise UserError(f"{place} has no column {listing(absent)}, which data.columns names for {role}; {there}")
        try:
            among = columns if role == "prompt" else [name for name in images if name not in found.get("control", [])]
            found[role] = names or _guess(role, among)
        except UserError as error:
            raise UserError(f"{place}: {error}; {there}: name it, as data.columns='{{{role}: NAME}}'") from error
    if missing := [role for role in WORDS if role in wanted and not found[role]]:
        raise UserError(
            f"{place} has no {listing([NOUNS[role] for role in missing])}; {there}: name them, as "
            f"data.columns='{{{', '.join(f'{role}: NAME' for role in missing)}}}'"
        )
    return found


def _guess(role: str, among: Sequence[str]) -> list[str]:
    """Return the column of the likeliest word; for control all of that word by number (source, source_2, ...)."""
    for wanted in WORDS[role]:
        found: dict[int, str] = {}
        for name in sorted(among, key=lambda name: name != wanted):  # the word itself comes first
            word, number = _word_and_number(name, role)
            if word == wanted:
                first = found.setdefault(number, name)
                if name not in (first, word) and first != word:
                    raise UserError(f"{first} and {name} may both be the {role}")
        if found:
            return [found[number] for number in sorted(found)]
    return []


def _word_and_number(name: str, role: str) -> tuple[str, int]:
    """Return the word of a column's name, and for control the number at its end; -1 without one, to come first.

    A file's suffix (`source.jpg` and `prompt.txt` in tars) is left out, and so are words for files and images, if
    something is left.
    """
    word, number = name.lower(), -1
    for suffix in (*IMAGE_SUFFIXES, *CAPTION_SUFFIXES):
        word = word.removesuffix(suffix)
    word = re.sub(r"[\s.-]+", "_", word)
    if role == "control" and (match := _NUMBER.search(word)):
        word, number = word[: match.start()], int(match[1])
    for _ in range(2) if role != "prompt" else ():
        word = _ENDINGS.sub("", word) or word
    return word, number


# Tables in text files.


def file_table(path: Path) -> Table:
    """Return a .csv or .jsonl table, whose file names are relative to its folder.

    Columns: see `COLUMNS`; control_file_name is a name or a JSON list, prompt a text, in JSON lines also a list. Other
    names are guessed.

    Raises:
        UserError: the table is malformed or has no rows.
    """
    text = read_text(path)
    rows = list(_csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text))
    if not rows:
        raise UserError(f"{path} has no rows")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    named = {role: [name] for role, name in COLUMNS.items() if name in columns}
    if "control" in named:
        numbered = [name for name in columns if _NUMBER.sub("", name) == COLUMNS["control"]]
        named["control"] = sorted(numbered, key=lambda name: _word_and_number(name, "control")[1])
    return Table(
        place=str(path),
        rows=[f"row {number}" for number in range(1, len(rows) + 1)],
        columns=columns,
        texts=columns,
        values=lambda name: [row.get(name) for row in rows],
        folder=path.parent,
        named=named,
    )


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
                _require_distinct(table, columns)
                continue
            if len(values) != len(columns):
                raise UserError(
                    f"{table} line {first}: {len(values)} values for {len(columns)} columns ({', '.join(columns)}); a "
                    "prompt with a comma needs quotes"
                )
            if swallowed := _swallowed_row(table.parent, values):
                raise UserError(f"{table} line {first}: a quote is left open, so a value holds the row of {swallowed}")
            yield dict(zip(columns, values, strict=True))
    except csv.Error as error:
        raise UserError(f"{table} line {line}: a quote is left open, or not doubled, in this row ({error})") from error


def _swallowed_row(folder: Path, values: Sequence[str]) -> str | None:
    """Return a file named on a further line of a value: an open quote that closes later makes one row of several."""
    cells = [cell.strip(' "') for value in values for line in value.splitlines()[1:] for cell in line.split(",")]
    return next((cell for cell in cells if os.path.isfile(folder / cell)), None)


def _require_distinct(table: Path, columns: Sequence[str]) -> None:
    if repeated := [name for name, count in Counter(columns).items() if count > 1]:
        raise UserError(f"{table} has the column {listing(repeated)} twice")


def _json_rows(table: Path, text: str) -> Iterator[dict[str, Any]]:
    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _require_distinct(table, [name for name, _ in pairs])
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
