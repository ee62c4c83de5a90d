"""Tables of samples: each row is a sample, each column a role, whether it is stored as text, Arrow or tars."""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datamodules.images.captions import captions_of
from datamodules.images.folders import is_image
from datamodules.images.samples import Found, ImageFile, Root, Sample
from foundation.errors import UserError, listing
from foundation.files import TABLE, Packed, is_below, read_text, reason, require_file

# Names of a folder's table.
TABLES = ("metadata.jsonl", "metadata.csv")
# Column names of files in a table of ours by role; they, and `prompt`, come before all others.
FILE_COLUMNS = {
    "control": "control_file_name",
    "target": "file_name",
    "mask": "mask_file_name",
    "rejected": "rejected_file_name",
}
# Common column names by role, in order of preference, with the spellings of a name between two commas.
COMMON = {
    "control": "control control_image, source source_image source_img source_file_name, src src_image src_img, "
    "input input_image input_img, original original_image original_img, before before_image, condition_image, "
    "conditioning_image, reference reference_image, references reference_images, refs, start start_image",
    "target": "target target_image target_img, edited edited_image edited_img edited_file_name, "
    "output output_image output_img, after after_image, result result_image, end end_image, chosen chosen_image, "
    "preferred preferred_image, image, images, img, picture, photo, file_name, path, jpg, jpeg, png, webp",
    "prompt": "txt, edit_prompt, edit_instruction, editing_instruction, instruction, instructions, prompt, prompts, "
    "captions, caption, text, description, edit, json",
    "mask": "mask mask_image mask_img",
    "rejected": "rejected rejected_image, dispreferred dispreferred_image",
    "swap_prompt": "swap_prompt",
}
PAIRS = "is a set of pairs, for data=cached and a model that edits; data=captions takes single images"
NOUNS = {"control": "column of condition images", "target": "column of targets", "prompt": "column of prompts"}
# A column's name, the number of a further control, and a suffix of files, as in tars.
_NAME = re.compile(r"(.+?)(?:_?(\d+))?(?:\.\w+)?")


@dataclass(frozen=True)
class Table:
    """A table to read samples from.

    Attributes:
        place, rows: its name and its rows' names in messages.
        values: returns the values of a column by row: a Packed image; a text, which may name a file below `folder`; a
            list of these; or None.
        images: columns of images, and of texts that name some.
        folder: folder of the files that texts name; None if they name none.
        closed: texts may name only files below `folder`.
        keys: keys of the samples; None for the names of the targets.
        names: known column names by role, as `COMMON`.
        incomplete: a line about each row that could not be read.
    """

    place: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Callable[[str], Sequence[Any]]
    images: Sequence[str]
    folder: Path | None = None
    closed: bool = False
    keys: Sequence[str] | None = None
    names: Mapping[str, str] = field(default_factory=lambda: COMMON)
    incomplete: Sequence[str] = ()


def samples_of(table: Table, root: Root, edits: bool = True) -> Found:
    """Return the samples of a table, in its order.

    Args:
        edits: read pairs, not images with captions. Rows without a caption are incomplete if the root requires one.

    Raises:
        UserError: a column is missing or ambiguous.
    """
    require_prompt = edits and root.require_prompt
    makes_controls = root.control is not None
    wanted = [*(["control"] if edits and not makes_controls else []), "target", *(["prompt"] if require_prompt else [])]
    roles = choose_columns(table, root.columns, wanted)
    if not edits and roles["control"] and "target" not in root.columns:
        raise UserError(f"{table.place} {PAIRS}: name the column, as data.columns='{{target: {roles['target'][0]}}}'")
    if not edits:
        roles["control"] = []
    values = {name: table.values(name) for names in roles.values() for name in names}
    samples: list[Sample] = []
    incomplete = list(table.incomplete)
    for number, row in enumerate(table.rows):
        cells = {role: [(name, values[name][number]) for name in names] for role, names in roles.items()}
        try:
            sample = _sample(table, cells, require_prompt)
        except UserError as error:
            incomplete.append(f"{table.place} {row}: {error}")
            continue
        if not root.require_prompt and not any(sample.prompts):
            sample = replace(sample, prompts=())
        key = str(Path(cells["target"][0][1]).with_suffix("")) if table.keys is None else table.keys[number]
        samples.append(replace(sample, key=key))
    if len({sample.key for sample in samples}) < len(samples):  # one image with several instructions
        samples = [replace(sample, key=f"{sample.key}#{number}") for number, sample in enumerate(samples, 1)]
    unread = [name for name in table.images if name not in values]
    notes = (f"{table.place}: images of other columns are not read: {listing(unread)}",) if unread else ()
    return Found(samples, incomplete, notes, "columns")


def _sample(table: Table, cells: Mapping[str, Sequence[tuple[str, Any]]], require_prompt: bool) -> Sample:
    """Return the sample of a row.

    Args:
        cells: the columns of each role, and their values in the row.

    Raises:
        UserError: an image or a caption is missing, or a value has a wrong type.
    """
    images: dict[str, list[ImageFile]] = {}
    for role in ("target", "control", "mask", "rejected"):
        found = [_images(table, name, value) for name, value in cells[role]]
        # Samples may have different numbers of condition images: the last of their columns may be empty, or all.
        if found and not found[0] and (role == "target" or (role == "control" and any(found))):
            raise UserError(f"{cells[role][0][0]} is empty")
        images[role] = [image for some in found for image in some]
        if role != "control" and len(images[role]) > 1:
            raise UserError(f"{cells[role][0][0]} must be one image, not a list")
    prompts, swapped = _texts(cells["prompt"]), tuple(filter(None, _texts(cells["swap_prompt"])))
    if require_prompt and not prompts:
        raise UserError(f"{cells['prompt'][0][0]} is empty")
    mask, rejected = (next(iter(images[role]), None) for role in ("mask", "rejected"))
    return Sample("", images["target"][0], tuple(images["control"]), prompts, mask, rejected, swap_prompts=swapped)


def _texts(cells: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the texts of a role in a row, given its column and value."""
    name, value = next(iter(cells), ("", None))
    if (texts := () if value in (None, []) else captions_of(value)) is None:
        raise UserError(f"{name} must be text, or a list of texts")
    return texts


def names_images(values: Sequence[Any]) -> bool:
    """Return whether any of the values of a column is the name of an image file."""
    texts = (one for value in values for one in _parsed(value) if isinstance(one, str))
    return any(is_image(one) and "://" not in one for one in texts)


def _parsed(value: Any) -> list[Any]:
    """Return one or several values as a list; a text may be a JSON list."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return value if isinstance(value, list) else [value]


def _images(table: Table, name: str, value: Any) -> list[ImageFile]:
    """Return the images of a cell: one, or several as a list (in CSV: a JSON list)."""
    values = [] if value in (None, "", []) else _parsed(value)
    if value and not values:
        raise UserError(f'{name}={value}: several images must be written as ["a.png", "b.png"]')
    if None in values:
        raise UserError(f"{name} is empty")
    found: list[ImageFile] = []
    for one in values:
        if isinstance(one, str):
            path = (folder := table.folder or Path()) / one
            try:
                require_file(path)
                if table.closed and not is_below(path, folder):
                    raise ValueError("it is outside of the data set, also by a link")
            except (OSError, ValueError) as error:
                raise UserError(f"{path}: {reason(error)}") from error
            found.append(path)
        elif isinstance(one, Packed):
            found.append(one)
        else:
            raise UserError(f"{name}={value}: must be an image or a list of images")
    return found


# The columns of a table by role.


def choose_columns(table: Table, named: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of each role: as named, or with a known name. Only controls may have several.

    Args:
        named: data.columns: for a role its column; for control also a list.
        wanted: roles that must have a column.

    Raises:
        UserError: a wanted column is missing, two are equally likely, or a named one does not exist.
    """
    there = f"its columns are {', '.join(table.columns)}"
    if unknown := [str(role) for role in named if role not in COMMON]:
        raise UserError(f"data.columns: there is no {listing(unknown)}; choose from {', '.join(COMMON)}")
    found: dict[str, list[str]] = {}
    for role, value in named.items():
        found[role] = list(value) if isinstance(value, list | tuple) else [value] if value else []
        if len(found[role]) > 1 and role != "control":
            raise UserError(f"data.columns.{role}={listing(list(map(str, value)))}: only control may have several")
        if absent := [str(name) for name in found[role] if name not in table.columns]:
            raise UserError(
                f"{table.place} has no column {listing(absent)}, which data.columns names for {role}; {there}"
            )
    taken = [name for names in found.values() for name in names]
    for role, names in table.names.items():
        among = [name for name in (table.columns if "prompt" in role else table.images) if name not in taken]
        try:
            likely = (_spelled(spellings.split(), role, among) for spellings in names.split(","))
            found[role] = found.get(role) or next(filter(None, likely), [])
        except UserError as error:
            raise UserError(f"{table.place}: {error}; {there}: name it, as data.columns='{{{role}: NAME}}'") from error
    if missing := [role for role in wanted if not found[role]]:
        raise UserError(
            f"{table.place} has no {listing([NOUNS[role] for role in missing])}; {there}: name them, as "
            f"data.columns='{{{', '.join(f'{role}: NAME' for role in missing)}}}'"
        )
    return found


def _spelled(spellings: Sequence[str], role: str, among: Sequence[str]) -> list[str]:
    """Return the column with one of these names; for control all of them by number (source, source_2, ...)."""
    found: dict[int, str] = {}
    for name in among:
        match = _NAME.fullmatch(name.lower().replace(" ", "_"))
        if match and match[1] in spellings and (match[2] is None or role == "control"):
            number = int(match[2] or -1)
            if number in found:
                raise UserError(f"{found[number]} and {name} may both be the {role}")
            found[number] = name
    return [found[number] for number in sorted(found)]


# Tables in text files.


def file_table(path: Path) -> Table:
    """Return a .csv or .jsonl table, whose file names are relative to its folder.

    A value of a condition image is a name or a JSON list, a prompt a text, in JSON lines also a list.

    Raises:
        UserError: the table is malformed or has no rows.
    """
    text = read_text(path, TABLE)
    rows = list(_csv_rows(path, text) if path.suffix == ".csv" else _json_rows(path, text))
    if not rows:
        raise UserError(f"{path} has no rows")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row.get(name) for row in rows] for name in columns}
    return Table(
        place=str(path),
        rows=[f"row {number}" for number in range(1, len(rows) + 1)],
        columns=columns,
        values=values.__getitem__,
        images=[name for name in columns if name in FILE_COLUMNS.values() or names_images(values[name])],
        folder=path.parent,
        names={role: f"{FILE_COLUMNS.get(role, role)}, {names}" for role, names in COMMON.items()},
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
        except (ValueError, RecursionError) as error:
            raise UserError(f"{table} line {number} is not JSON: {getattr(error, 'msg', error)}") from error
        if not isinstance(row, dict):
            raise UserError(f"{table} line {number} is not an object of columns")
        yield row
