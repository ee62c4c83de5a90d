"""What a run's tables say: the numbers at the head of its report, and the curves."""

import csv
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# What a metric compares beside result and target, by their places in (source, result, target).
ENDS = {"_source": (1, 0), "_nothing": (0, 2)}
POINTS = 400  # of a curve, about
FEWEST = 20  # from so many points on, those that are far from all others are left outside
COLORS = "abcd"


class Line(NamedTuple):
    """A column over its steps."""

    name: str
    column: str
    color: str
    faint: bool = False
    dashed: bool = False


def monitored(monitor: str | None, usual: str, metrics: Collection[str]) -> str:
    """Return the figure by which steps and runs with held-out samples are compared.

    Args:
        monitor: the setting; None or loss_avg for
        usual: the model's, if it is among
        metrics: the names of what is measured; else val_loss.
    """
    if monitor not in (None, "loss_avg"):
        return str(monitor)
    return usual if usual in metrics else "val_loss"


def read_rows(path: Path) -> list[dict[str, float]]:
    """A run's validation.csv; nothing where it has none."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def read_metrics(path: Path) -> list[dict[str, str]]:
    """A run's metrics.csv; nothing where it has none."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def headline(metrics: Sequence[Mapping[str, str]], validation: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """The numbers at the top of the page: name and value."""
    numbers = []
    if validation:
        first, now = validation[0], validation[-1]
        for name in [name for name in metric_names(now) if name in first]:
            nothing = f", doing nothing {now[f'{name}_nothing']:.3g}" if f"{name}_nothing" in now else ""
            numbers.append((f"{name} (before {first[name]:.3g}{nothing})", f"{now[name]:.3g}"))
        numbers.append((f"validation loss (before {first['val_loss']:.3g})", f"{now['val_loss']:.3g}"))
    if metrics:
        speed = statistics.median(float(row["samples_per_second"]) for row in metrics)
        numbers.append(("samples a second", f"{speed:.3g}"))
        numbers.append(("GB at most", f"{max(float(row['peak_memory_gb']) for row in metrics):.2f}"))
        numbers.append(("minutes", f"{float(metrics[-1]['seconds']) / 60:.1f}"))
    return numbers


def curves(metrics: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """What the page draws: charts, each of some lines."""
    charts = [_chart(metrics, Line("", "loss", "a", faint=True), Line("training loss", "loss_avg", "a"))]
    if validation:
        columns = validation[-1].keys() - {"step"}
        bands = sorted(name for name in columns if name.startswith("val_loss_t"))
        names = [f"t {n / len(bands):.2g} to {(n + 1) / len(bands):.2g}" for n in range(len(bands))]
        charts.append(_chart(validation, Line("validation loss", "val_loss", "b")))
        charts.append(_chart(validation, *map(Line, names, bands, COLORS)))
        for name in metric_names(validation[-1]):
            lines = [Line(name, name, "c")]
            if f"{name}_nothing" in columns:  # there is a picture that was edited
                lines.append(Line("to the source", f"{name}_source", "b"))
                lines.append(Line("of doing nothing", f"{name}_nothing", "a", dashed=True))
            charts.append(_chart(validation, *lines))
    return [chart for chart in charts if chart["lines"]]


def _chart(rows: Sequence[Mapping[str, Any]], *lines: Line) -> dict[str, Any]:
    """Lines thinned out, the range of the axis, and what does not lie in it: a few spikes must not flatten the rest."""
    known = {line: [(_step(row), float(row[line.column])) for row in rows if _filled(row, line)] for line in lines}
    finite = {line: [point for point in points if math.isfinite(point[1])] for line, points in known.items()}
    finite = {line: points for line, points in finite.items() if points}
    if not finite:
        return {"lines": []}
    values = [value for points in finite.values() for _, value in points]
    low, high = min(values), max(values)
    first = next(iter(finite))
    usual = [value for _, value in finite[first]]
    if len(usual) >= FEWEST:
        tenths = statistics.quantiles(usual, n=10)
        far = 3 * (tenths[-1] - tenths[0])
        near = [value for value in usual if tenths[0] - far <= value <= tenths[-1] + far]
        if far > 0 and len(near) < len(usual):
            low, high = min(near), max(near)
    outside = sum(not low <= value <= high for value in usual)
    broken = len(known[first]) - len(usual)
    counts = {f"{outside} of {len(usual)} points outside": outside, f"{broken} not finite": broken}
    return {
        "lines": [{**line._asdict(), "points": _thin(points)} for line, points in finite.items()],
        "range": [low, high],
        "note": ", ".join(text for text, count in counts.items() if count),
    }


def _step(row: Mapping[str, Any]) -> int:
    return int(float(row["step"]))


def _filled(row: Mapping[str, Any], line: Line) -> bool:
    return row.get(line.column) not in (None, "")


def _thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lowest and the highest of each few points, and the last: no spike goes."""
    few = -(-2 * len(points) // POINTS)
    if few <= 2:
        return list(points)
    parts = [points[start : start + few] for start in range(0, len(points), few)]
    kept = {pick(part, key=lambda point: point[1]) for part in parts for pick in (min, max)}
    return sorted(kept | {points[-1]})


def metric_names(row: Mapping[str, float]) -> list[str]:
    """The names of the metrics in a row of validation.csv."""
    return [
        name for name in row if name != "step" and not name.startswith("val_loss") and not name.endswith(tuple(ENDS))
    ]
