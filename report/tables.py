"""Tables of a run, metrics.csv and validation.csv, with the numbers and curves that a report shows of them."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foundation.files import read_bytes, reading, replacing

# Comparisons of a metric besides result and target, by their indices in (source, result, target). The last one is of
# samples whose target is the source; the others leave these out.
STAYING = "_staying"
ENDS = {"_source": (1, 0), "_nothing": (0, 2), STAYING: (1, 2)}
POINTS = 2000  # of a curve at most
DIVERGED = 10  # times the usual reach of a chart's lines, beyond which a line does not set the scale
MOST_BYTES, MOST_ROWS = 2**26, 300_000  # of a table that is read as a whole
COLORS = "abcdef"

Rows = Sequence[Mapping[str, Any]]


class Line(NamedTuple):
    """A column over its steps, as a series of uPlot."""

    label: str
    column: str
    color: str
    alpha: float = 1
    dash: tuple[int, ...] = ()


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
    return [
        name for name in row if name != "step" and not name.startswith("val_loss") and not name.endswith(tuple(ENDS))
    ]


class Change(NamedTuple):
    """A figure before and after training.

    Attributes:
        nothing: its value for images that copy their input.
        staying: its value where the target is the input.
    """

    name: str
    before: float
    now: float
    nothing: float | None
    staying: float | None

    def bounds(self, decimals: int) -> str:
        """Return `, doing nothing 11, images that stay 31`, as far as there are such samples."""
        words = {"doing nothing": self.nothing, "images that stay": self.staying}
        return "".join(f", {word} {value:.{decimals}g}" for word, value in words.items() if value is not None)


def changes(validation: Sequence[Mapping[str, float]]) -> list[Change]:
    """Return the validation loss and each metric in the first and in the last row of validation.csv."""
    if not validation:
        return []
    first, now = validation[0], validation[-1]
    names = {"val_loss": "validation loss", **{name: name for name in metric_names(now) if name in first}}
    return [
        Change(shown, first[name], now[name], now.get(f"{name}_nothing"), now.get(f"{name}{STAYING}"))
        for name, shown in names.items()
    ]


def headline(metrics: Sequence[Mapping[str, str]], validation: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return names and values of the numbers at the top of the page."""
    numbers = []
    for one in changes(validation):
        numbers.append((f"{one.name} (before {one.before:.3g}{one.bounds(3)})", f"{one.now:.3g}"))
    if metrics:
        speed = statistics.median(float(row["samples_per_second"]) for row in metrics)
        numbers.append(("samples a second", f"{speed:.3g}"))
        numbers.append(("GB at most", f"{max(float(row['peak_memory_gb']) for row in metrics):.2f}"))
        numbers.append(("minutes", f"{float(metrics[-1]['seconds']) / 60:.1f}"))
    return numbers


def curves(metrics: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the charts of the page, each with its lines."""
    loss = [Line("each step", "loss", "a", alpha=0.4), Line("average", "loss_avg", "a")]
    charts = [_chart("training loss", [(metrics, line) for line in loss])]
    if validation:
        columns = validation[-1].keys() - {"step"}
        bands = sorted(name for name in columns if name.startswith("val_loss_t"))
        names = [f"t {n / len(bands):.2g} to {(n + 1) / len(bands):.2g}" for n in range(len(bands))]
        named = {"validation loss": [Line("all timesteps", "val_loss", "b")]}
        named["validation loss by timestep"] = list(map(Line, names, bands, COLORS))
        for name in metric_names(validation[-1]):
            named[name] = [Line("result", name, "c")]
            if f"{name}_nothing" in columns:  # only of edits
                named[name].append(Line("to the source", f"{name}_source", "b"))
                named[name].append(Line("of doing nothing", f"{name}_nothing", "a", dash=(5, 4)))
        charts += [_chart(title, [(validation, line) for line in lines]) for title, lines in named.items()]
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
    charts = [_chart("training loss", [(runs[name][0], Line(name, "loss_avg", ink)) for name, ink in inks.items()])]
    for metric in measured:
        lines = [(runs[name][1], Line(name, metric, ink)) for name, ink in inks.items()]
        charts.append(_chart(metric.replace("val_loss", "validation loss"), lines))
    return [chart for chart in charts if chart["lines"]]


def _chart(title: str, lines: Sequence[tuple[Rows, Line]]) -> dict[str, Any]:
    """Return the thinned lines and the range of the axis; points that are not finite are counted in the title.

    The range leaves out a hundredth of a line's points at either end, and diverged lines: both would flatten the rest.
    """
    drawn, ends, broken = [], [], 0
    for rows, line in lines:
        known = {int(float(row["step"])): float(row[line.column]) for row in rows if line.column in row}
        points = {step: value for step, value in known.items() if math.isfinite(value)}
        broken += len(known) - len(points)
        if points:
            steps = list(points)[:: -(-len(points) // POINTS)]
            drawn.append({**line._asdict(), "x": steps, "y": [points[step] for step in steps]})
            ordered, far = sorted(points.values()), len(points) // 100
            ends.append((ordered[far], ordered[-1 - far]))
    usual = statistics.median_low(max(map(abs, pair)) for pair in ends) if ends else 0
    shown = [end for pair in ends if max(map(abs, pair)) <= DIVERGED * (usual or math.inf) for end in pair]
    title += f", points not finite: {broken}" if broken else ""
    return {"title": title, "lines": drawn, "range": [min(shown, default=0), max(shown, default=0)]}
