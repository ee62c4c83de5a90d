"""Tables of samples: metadata.csv and metadata.jsonl."""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import read_text
from datamodules.images.prompts import lines_of
from datamodules.images.rows import Table

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
