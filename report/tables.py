"""Tables of a run, metrics.csv and validation.csv, with the numbers and curves that a report shows of them."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foundation.files import read_bytes, reading, replacing

# Comparisons of a metric besides result and target, by their indices in (source, result, target).
ENDS = {"_source": (1, 0), "_nothing": (0, 2)}
POINTS = 2000  # of a curve at most
MOST_BYTES, MOST_ROWS = 2**26, 300_000  # of a table that is read as a whole
COLORS = "abcdef"


Rows = Sequence[Mapping[str, Any]]


class Line(NamedTuple):
    """A column over its steps."""

    name: str
    column: str
    color: str
    faint: bool = False
    dashed: bool = False


def read_validation(path: Path) -> list[dict[str, float]]:
    """Return the rows of a run's validation.csv; none without the file."""
    with reading(path, "repair or remove it"):
        return [{name: float(value) for name, value in row.items() if value} for row in read_metrics(path)]


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the complete rows of a run's metrics.csv; none without the file."""
    if not path.is_file():
        return []
    with reading(path, "repair or remove it"):
        text = read_bytes(path, MOST_BYTES).decode()
        if text.count("\n") > MOST_ROWS:
            raise ValueError(f"it has more than {MOST_ROWS:,} rows")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return [row for row in rows if None not in (*row, *row.values())]


def last_metrics(path: Path) -> dict[str, str]:
    """Return the last complete row of a run's metrics.csv, without reading the others; nothing without one."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        names = file.readline(4096).decode().split(",")
        file.seek(max(file.tell(), path.stat().st_size - 4096))
        *lines, _ = file.read().decode(errors="replace").split("\n")  # the last one may still be written
    values = lines[-1].split(",") if lines else []
    return {name.strip(): value.strip() for name, value in zip(names, values, strict=False)}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
    """Write a table atomically, with these columns, or those of all rows."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        names = columns or dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(file, names, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


def metric_names(row: Mapping[str, float]) -> list[str]:
    """Return the names of the metrics in a row of validation.csv."""
    return [
        name for name in row if name != "step" and not name.startswith("val_loss") and not name.endswith(tuple(ENDS))
    ]


class Change(NamedTuple):
    """A figure before and after training; `nothing` is its value for images that copy their input."""

    name: str
    before: float
    now: float
    nothing: float | None


def changes(validation: Sequence[Mapping[str, float]]) -> list[Change]:
    """Return the validation loss and each metric in the first and in the last row of validation.csv."""
    if not validation:
        return []
    first, now = validation[0], validation[-1]
    names = {"val_loss": "validation loss", **{name: name for name in metric_names(now) if name in first}}
    return [Change(shown, first[name], now[name], now.get(f"{name}_nothing")) for name, shown in names.items()]


def headline(metrics: Sequence[Mapping[str, str]], validation: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return names and values of the numbers at the top of the page."""
    numbers = []
    for name, before, now, nothing in changes(validation):
        more = "" if nothing is None else f", doing nothing {nothing:.3g}"
        numbers.append((f"{name} (before {before:.3g}{more})", f"{now:.3g}"))
    if metrics:
        speed = statistics.median(float(row["samples_per_second"]) for row in metrics)
        numbers.append(("samples a second", f"{speed:.3g}"))
        numbers.append(("GB at most", f"{max(float(row['peak_memory_gb']) for row in metrics):.2f}"))
        numbers.append(("minutes", f"{float(metrics[-1]['seconds']) / 60:.1f}"))
    return numbers


def curves(metrics: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the charts of the page, each with its lines."""
    charts = [_chart(metrics, Line("", "loss", "a", faint=True), Line("training loss", "loss_avg", "a"))]
    if validation:
        columns = validation[-1].keys() - {"step"}
        bands = sorted(name for name in columns if name.startswith("val_loss_t"))
        names = [f"t {n / len(bands):.2g} to {(n + 1) / len(bands):.2g}" for n in range(len(bands))]
        charts.append(_chart(validation, Line("validation loss", "val_loss", "b")))
        charts.append(_chart(validation, *map(Line, names, bands, COLORS)))
        for name in metric_names(validation[-1]):
            lines = [Line(name, name, "c")]
            if f"{name}_nothing" in columns:  # only of edits
                lines.append(Line("to the source", f"{name}_source", "b"))
                lines.append(Line("of doing nothing", f"{name}_nothing", "a", dashed=True))
            charts.append(_chart(validation, *lines))
    return [chart for chart in charts if chart["lines"]]


def compared_curves(runs: Mapping[str, tuple[Rows, Rows]]) -> list[dict[str, Any]]:
    """Return the charts of several runs, each with a line for each run.

    Args:
        runs: metrics and validation by name; as many as there are `COLORS`.
    """
    inks = dict(zip(runs, COLORS, strict=False))
    measured = dict.fromkeys(
        name for _, rows in runs.values() if rows for name in ("val_loss", *metric_names(rows[-1]))
    )
    charts = [[(runs[name][0], Line(name, "loss_avg", ink)) for name, ink in inks.items()]]
    charts += [[(runs[name][1], Line(name, metric, ink)) for name, ink in inks.items()] for metric in measured]
    titles = ["training loss", *(name.replace("val_loss", "validation loss") for name in measured)]
    drawn = [{**_draw(lines), "title": title} for lines, title in zip(charts, titles, strict=True)]
    return [chart for chart in drawn if chart["lines"]]


def _chart(rows: Rows, *lines: Line) -> dict[str, Any]:
    """Return a chart of columns of one table."""
    return _draw([(rows, line) for line in lines])


def _draw(lines: Sequence[tuple[Rows, Line]]) -> dict[str, Any]:
    """Return the thinned lines, the range of the axis, and a note on points that are not finite.

    The axis leaves out the hundredth of a faint line's points at either end, which would flatten the rest.
    """
    drawn, values, broken = [], [], 0
    for rows, line in lines:
        known = [(int(float(row["step"])), float(row[line.column])) for row in rows if line.column in row]
        points = [point for point in known if math.isfinite(point[1])]
        broken += len(known) - len(points)
        if points:
            drawn.append({**line._asdict(), "points": points[:: -(-len(points) // POINTS)]})
            far = len(points) // 100 if line.faint else 0
            values += sorted(value for _, value in points)[far : len(points) - far]
    note = f"{broken} points not finite" if broken else ""
    return {"lines": drawn, "range": [min(values), max(values)], "note": note} if values else {"lines": []}
