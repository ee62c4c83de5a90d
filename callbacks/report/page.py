"""What stands on a report's page, read from a run's folder, and writing it."""

import base64
import io
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from PIL import Image, ImageDraw

from callbacks.image_writer import save_png, scaled
from callbacks.run_folder import RunFolder
from callbacks.sample_images import NO_TARGET, PARTS
from datamodules.errors import without_credentials
from datamodules.files import replacing

# Pixels of the longer side: of a picture on the page, and of a sample of the data.
LARGEST, THUMBNAIL = 512, 128
TEMPLATE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)


class Strip(NamedTuple):
    """A sample picture's parts, and the prompt; an image of sample_root has no target."""

    controls: list[Image.Image]
    result: Image.Image
    target: Image.Image | None
    prompt: str


def read_strip(path: Path) -> Strip:
    """Cut a picture that `SampleImages` wrote into its parts."""
    with Image.open(path) as file:
        facts, image = file.info, file.convert("RGB")
    widths = [int(width) for width in facts[PARTS].split()]
    edges = [sum(widths[:n]) for n in range(len(widths) + 1)]
    parts = [image.crop((left, 0, right, image.height)) for left, right in pairwise(edges)]
    target = None if NO_TARGET in facts else parts.pop()
    *controls, result = parts
    return Strip(controls, result, target, facts.get("prompt", ""))


def sample_files(run: RunFolder) -> dict[int, dict[str, Path]]:
    """A run's sample pictures, by step and name."""
    return {
        step: {path.stem: path for path in sorted(folder.glob("*.png"))} for step, folder in run.sampled_steps().items()
    }


def data_url(image: Image.Image, largest: int = LARGEST) -> str:
    """A picture as it stands in the page: small ones exact, large ones scaled and compressed."""
    exact = max(image.size) <= THUMBNAIL
    image = image.copy()
    image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG" if exact else "WEBP", **({} if exact else {"quality": 85}))
    kind = "png" if exact else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


SECRET = re.compile(r"token(?!s)|secret|password|passwd|api_?key|auth|credential", re.IGNORECASE)


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
    text = without_credentials(text)
    return re.sub(r"(?<![\w:/.}$])(?:~\w*|[A-Za-z]:)?[/\\](?:[^\s'\",\]/\\]+[/\\])+([^\s'\",\]/\\]+)", r".../\1", text)


def render(path: Path, **page: Any) -> None:
    """Write a page whole or not at all."""
    lists = ("numbers", "jobs", "rows", "steps", "results", "curves", "data_lines", "thumbs", "lines")
    nothing: dict[str, Any] = {name: [] for name in lists}
    nothing |= dict.fromkeys(("config", "monitor", "picture_names", "pictures_title", "subtitle", "figure"), "")
    nothing |= {"commands": {}, "unfinished": False, "row_width": 420}
    template = TEMPLATE.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    with replacing(path) as temporary:
        temporary.write_text(template.render(nothing | page), encoding="utf-8")


def write_grid(run: RunFolder, path: Path | None = None, step: int | None = None, most: int | None = None) -> bool:
    """Control, before, after and target of each sample, two samples a row; whether there are such pictures.

    Args:
        path: in place of the run's grid.png.
        step: the last that may be shown.
        most: samples, the first of all.
    """
    samples = {at: files for at, files in sample_files(run).items() if step is None or at <= step}
    if len(samples) < 2 or 0 not in samples:  # of a run that branched off, the base's are elsewhere
        return False
    before, after = (
        {name: read_strip(path) for name, path in samples[at].items()} for at in (min(samples), max(samples))
    )
    known = [(before[name], strip, strip.target) for name, strip in after.items() if name in before]
    complete = [[*strip.controls[:1], base.result, strip.result, target] for base, strip, target in known if target]
    rows = complete[:most]
    if not rows:
        return False
    side = max(max(part.size) for row in rows for part in row)
    scale = max(1, round(128 / side)) if side < 512 else 512 / side
    cell = round(side * scale) + 6
    columns = len(rows[0])
    titles = ["control", "before", "after", "target"][-columns:]
    across = min(2, len(rows))
    grid = Image.new("RGB", (across * columns * cell + (across - 1) * 24, 20 + -(-len(rows) // across) * cell), "white")
    canvas = ImageDraw.Draw(grid)
    for number, row in enumerate(rows):
        left = number % across * (columns * cell + 24)
        for column, (part, title) in enumerate(zip(row, titles, strict=True)):
            resized = scaled(part, scale, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
            grid.paste(resized, (left + column * cell + 3, 20 + number // across * cell + 3))
            canvas.text((left + column * cell + 3, 4), title, fill="black")
    save_png(grid, run.grid if path is None else path)
    return True
