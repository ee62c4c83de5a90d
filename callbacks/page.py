"""What stands on a report's page, read from a run's folder, and writing it."""

import base64
import csv
import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from PIL import Image, ImageDraw

from callbacks.image_writer import save_png
from callbacks.sample_images import PARTS
from callbacks.validation import ENDS
from datamodules.files import replacing

# Pixels of the longer side: of a picture on the page, and of a sample of the data.
LARGEST, THUMBNAIL = 512, 128
POINTS = 400  # of a curve
COLORS = "abcd"
TEMPLATE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)


class Strip(NamedTuple):
    """A sample picture's parts, and the prompt."""

    controls: list[Image.Image]
    result: Image.Image
    target: Image.Image
    prompt: str


def read_strip(path: Path) -> Strip:
    """Part the strips that `SampleImages` writes."""
    with Image.open(path) as file:
        facts, image = file.info, file.convert("RGB")
    widths = [int(width) for width in facts[PARTS].split()]
    edges = [sum(widths[:n]) for n in range(len(widths) + 1)]
    *controls, result, target = (image.crop((left, 0, right, image.height)) for left, right in pairwise(edges))
    return Strip(controls, result, target, facts.get("prompt", ""))


def sample_files(run: Path) -> dict[int, dict[str, Path]]:
    """A run's sample pictures, by step and name."""
    folders = sorted((run / "samples").glob("step-*"))
    return {
        int(folder.name.removeprefix("step-")): {
            path.stem: path for path in sorted(folder.glob("*.png")) if _is_strip(path)
        }
        for folder in folders
    }


def _is_strip(path: Path) -> bool:
    """Strips of earlier versions do not tell their parts."""
    with Image.open(path) as image:
        return PARTS in image.info


def data_url(image: Image.Image, largest: int = LARGEST) -> str:
    """A picture as it stands in the page: small ones exact, large ones scaled and compressed."""
    exact = max(image.size) <= THUMBNAIL
    image = image.copy()
    image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG" if exact else "WEBP", **({} if exact else {"quality": 85}))
    kind = "png" if exact else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


SECRET = re.compile(r"token|secret|password|passwd|api_?key|auth|credential", re.IGNORECASE)


def shareable(settings: Any) -> Any:
    """Settings for others to read: values that are named as secrets are masked, texts are `without_secrets`."""
    if isinstance(settings, Mapping):
        return {
            key: "***" if SECRET.search(str(key)) and value and not isinstance(value, Mapping) else shareable(value)
            for key, value in settings.items()
        }
    if isinstance(settings, list | tuple):
        return [shareable(value) for value in settings]
    return without_secrets(settings) if isinstance(settings, str) else settings


def without_secrets(text: str) -> str:
    """A text without folders of this machine, tokens, credentials in addresses, or commands."""
    if re.match(r"(~|/|[A-Za-z]:[/\\])[^\n]*$", text):  # nothing but a path, which may hold blanks
        return ".../" + re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    text = re.sub(r"\bpipe:.*", "pipe:***", text)
    text = re.sub(r"\bfile://\S*/", "file://.../", text)
    text = re.sub(r"(?i)\b(bearer|basic) \S+", r"\1 ***", text)
    text = re.sub(r"\b(hf_\w{8,}|AKIA\w{12,}|gh[pousr]_\w{20,})", "***", text)
    text = re.sub(r"(\w+://)[^/\s@]+@", r"\1***@", text)
    text = re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]+", r"\1?***", text)
    return re.sub(r"(?<![\w:/.}$])(?:~\w*|[A-Za-z]:)?[/\\](?:[^\s'\",\]/\\]+[/\\])+([^\s'\",\]/\\]+)", r".../\1", text)


def _line(name: str, rows: Sequence[Mapping[str, Any]], column: str, color: str, **style: bool) -> dict[str, Any]:
    """A column of a table over its steps, thinned out."""
    points = [(int(float(row["step"])), float(row[column])) for row in rows if row.get(column) not in (None, "")]
    thin = points[:: max(1, len(points) // POINTS)] + points[-1:]
    finite = [(step, value if abs(value) < float("inf") else None) for step, value in thin]
    return {"name": name, "points": finite, "color": color, **style}


def curves(metrics: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """What the page draws: charts, each of some lines."""
    charts = []
    if metrics:
        lines = [_line("", metrics, "loss", "a", faint=True), _line("training loss", metrics, "loss_avg", "a")]
        charts.append({"lines": lines})
    if validation:
        columns = validation[-1].keys() - {"step"}
        bands = sorted(name for name in columns if name.startswith("val_loss_t"))
        names = [f"t {n / len(bands):.2g} to {(n + 1) / len(bands):.2g}" for n in range(len(bands))]
        by_band = zip(names, bands, COLORS, strict=True)
        charts.append({"lines": [_line("validation loss", validation, "val_loss", "b")]})
        charts.append({"lines": [_line(name, validation, band, color) for name, band, color in by_band]})
        for name in _metrics(validation[-1]):
            lines = [_line(name, validation, name, "c")]
            if f"{name}_nothing" in columns:  # there is a picture that was edited
                lines.append(_line("to the source", validation, f"{name}_source", "b"))
                lines.append(_line("of doing nothing", validation, f"{name}_nothing", "a", dashed=True))
            charts.append({"lines": lines})
    return charts


def _metrics(row: Mapping[str, float]) -> list[str]:
    """The names of the metrics in a row of validation.csv."""
    return [
        name for name in row if name != "step" and not name.startswith("val_loss") and not name.endswith(tuple(ENDS))
    ]


def read_metrics(run: Path) -> list[dict[str, str]]:
    """A run's metrics.csv."""
    path = run / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def render(path: Path, **page: Any) -> None:
    """Write a page whole or not at all."""
    lists = ("numbers", "jobs", "rows", "steps", "results", "curves", "data_lines", "thumbs")
    nothing: dict[str, Any] = {name: [] for name in lists}
    nothing |= dict.fromkeys(("config", "monitor", "picture_names", "pictures_title", "subtitle"), "")
    nothing |= {"commands": {}, "unfinished": False, "row_width": 420}
    template = TEMPLATE.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    with replacing(path) as temporary:
        temporary.write_text(template.render(nothing | page), encoding="utf-8")


def headline(metrics: Sequence[Mapping[str, str]], validation: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """What stands above all else."""
    numbers = []
    if validation:
        first, now = validation[0], validation[-1]
        for name in [name for name in _metrics(now) if name in first]:
            nothing = f", doing nothing {now[f'{name}_nothing']:.3g}" if f"{name}_nothing" in now else ""
            numbers.append((f"{name} (before {first[name]:.3g}{nothing})", f"{now[name]:.3g}"))
        numbers.append((f"validation loss (before {first['val_loss']:.3g})", f"{now['val_loss']:.3g}"))
    if metrics:
        speed = statistics.median(float(row["samples_per_second"]) for row in metrics)
        numbers.append(("samples a second", f"{speed:.3g}"))
        numbers.append(("GB at most", f"{float(metrics[-1]['peak_memory_gb']):.2f}"))
        numbers.append(("minutes", f"{float(metrics[-1]['seconds']) / 60:.1f}"))
    return numbers


def write_grid(run: Path) -> None:
    """grid.png: control, before, after and target of each sample, two samples a row."""
    samples = sample_files(run)
    if len(samples) < 2:
        return
    before, after = (
        {name: read_strip(path) for name, path in samples[step].items()} for step in (min(samples), max(samples))
    )
    rows = [[*s.controls[:1], before[name].result, s.result, s.target] for name, s in after.items() if name in before]
    if not rows:
        return
    side = max(max(part.size) for row in rows for part in row)
    scale = max(1, round(128 / side)) if side < 512 else 512 / side
    cell = round(side * scale) + 6
    columns = len(rows[0])
    names = ["control", "before", "after", "target"][-columns:]
    across = min(2, len(rows))
    grid = Image.new("RGB", (across * columns * cell + (across - 1) * 24, 20 + -(-len(rows) // across) * cell), "white")
    canvas = ImageDraw.Draw(grid)
    for number, row in enumerate(rows):
        left = number % across * (columns * cell + 24)
        for column, (part, name) in enumerate(zip(row, names, strict=True)):
            size = (round(part.width * scale), round(part.height * scale))
            resized = part.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
            grid.paste(resized, (left + column * cell + 3, 20 + number // across * cell + 3))
            canvas.text((left + column * cell + 3, 4), name, fill="black")
    save_png(grid, run / "grid.png")


def write_sweep(folder: Path, jobs: Sequence[Mapping[str, Any]], monitor: str, higher_is_better: bool) -> None:
    """report.html of a sweep: a row a job, the best first.

    Args:
        jobs: `job` (the name of its folder), `overrides`, and `value` (of `monitor`; None where it failed).
    """

    def order(job: Mapping[str, Any]) -> tuple[bool, float]:
        value = job["value"]
        known = value is not None and math.isfinite(value)
        return not known, 0.0 if not known else -value if higher_is_better else value

    shown = []
    for job in sorted(jobs, key=order):
        samples = sample_files(folder / job["job"])
        strips = [read_strip(path) for path in list(samples[max(samples)].values())[:4]] if samples else []
        shown.append(
            {
                "name": job["job"],
                "overrides": without_secrets(job["overrides"]),
                "value": "failed" if job["value"] is None else f"{job['value']:.4g}",
                "strips": [[data_url(one, THUMBNAIL) for one in (*s.controls, s.result, s.target)] for s in strips],
            }
        )
    render(
        folder / "report.html",
        title=folder.name,
        subtitle=f"{len(shown)} runs, by {monitor}",
        jobs=shown,
        monitor=monitor,
        picture_names="control, result, target",
    )
