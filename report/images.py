"""Images that a run writes: PNG files, sample strips and what is read back from them, grids and plots."""

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from foundation.files import reading, replacing, require_file, short_name
from runs.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

# Longest side in pixels of an image next to others.
LONGEST = 4096
# Pixels of the longer side on a page: of an image, and of a sample of the data.
LARGEST, THUMBNAIL = 512, 128
# A labelled row, in pixels: shortest longer side of an image, gap between two, height of a label.
SMALLEST, GAP, LABEL = 128, 6, 18
# Side in pixels of a checkerboard's squares.
SQUARE = 8
# Text chunks of a strip's PNG: the widths of its parts and the own sizes of its controls; marks of strips without a
# target, and of those not to publish.
PARTS, SIZES = "parts", "control sizes"
NO_TARGET, PRIVATE = "no target", "private"


def to_image(pixels: "Tensor") -> Image.Image:
    """Convert (1, C, H, W) in [-1, 1] to 8 bit, rounded as in diffusers; NaN becomes black; with alpha if needed."""
    array = (pixels[0] / 2 + 0.5).nan_to_num(0.0).clamp(0, 1).permute(1, 2, 0).float().cpu().numpy()
    image = Image.fromarray((array * 255).round().astype("uint8"))
    return image.convert("RGB") if image.mode == "RGBA" and image.getchannel("A").getextrema() == (255, 255) else image


def opaque(image: Image.Image) -> Image.Image:
    """Show the transparent parts of an image as a checkerboard."""
    if image.mode != "RGBA":
        return image
    rows, columns = np.indices((image.height, image.width)) // SQUARE
    board = np.where((rows + columns) % 2, 204, 255).astype("uint8")
    below = Image.fromarray(np.repeat(board[:, :, None], 3, axis=2)).convert("RGBA")
    return Image.alpha_composite(below, image).convert("RGB")


def save_png(image: Image.Image, path: Path, facts: Mapping[str, str] | None = None) -> None:
    """Write an image atomically, with named text chunks."""
    info = PngInfo()
    for name, text in (facts or {}).items():
        info.add_itxt(name, text)
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=info)


def scaled(image: Image.Image, factor: float, resample: Image.Resampling = Image.Resampling.LANCZOS) -> Image.Image:
    """Resize in proportion, to at least one pixel each way."""
    width, height = (max(1, round(side * factor)) for side in image.size)
    return image if (width, height) == image.size else image.resize((width, height), resample)


def in_a_row(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Scale images to the height of the last, none longer than LONGEST; a very wide one becomes a band between bars."""
    images = list(map(opaque, images))
    last = scaled(images[-1], min(1.0, LONGEST / max(images[-1].size)))
    height, widest = last.height, max(last.width, 4 * last.height)
    row = []
    for image in images[:-1]:
        part = scaled(image, min(height / image.height, widest / image.width))
        if part.height != height:
            band, part = part, Image.new("RGB", (part.width, height), "gray")
            part.paste(band, (0, (height - band.height) // 2))
        row.append(part)
    return [*row, last]


def labelled_row(images: Mapping[str, Image.Image]) -> Image.Image:
    """Draw images in a row, all as high as the last, with a label above each."""
    row = in_a_row(list(images.values()))
    side = max(row[-1].size)
    factor = LARGEST / side if side > LARGEST else max(1, round(SMALLEST / side))
    row = [scaled(image, factor, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS) for image in row]
    above = LABEL + 2 * GAP
    strip = Image.new("RGB", (sum(one.width + GAP for one in row) - GAP, above + row[-1].height), "white")
    canvas, left = ImageDraw.Draw(strip), 0
    for label, image in zip(images, row, strict=True):
        canvas.text((left + image.width / 2, above / 2), label, fill="black", anchor="mm", font_size=LABEL)
        strip.paste(image, (left, above))
        left += image.width + GAP
    return strip


class Strip(NamedTuple):
    """Parts of a sample image, and its prompt; an image of sample_root has no target.

    Attributes:
        private: it is not published: its files are not of data.root.
        sizes: (width, height) at which the model sees the controls, which are scaled in the file.
    """

    controls: list[Image.Image]
    result: Image.Image
    target: Image.Image | None
    prompt: str
    private: bool = False
    sizes: Sequence[tuple[int, int]] = ()

    @property
    def parts(self) -> list[Image.Image]:
        """Images in their order in the file."""
        return [*self.controls, self.result, *([] if self.target is None else [self.target])]

    def write(self, path: Path) -> Image.Image:
        """Write controls, result and target as one PNG, and return it."""
        parts = in_a_row(self.parts)
        image = Image.fromarray(np.concatenate([np.asarray(part) for part in parts], axis=1))
        marks = {NO_TARGET: self.target is None, PRIVATE: self.private}
        facts = {PARTS: " ".join(str(part.width) for part in parts), "prompt": self.prompt}
        facts[SIZES] = " ".join(f"{one.width}x{one.height}" for one in self.controls)
        save_png(image, path, facts | {name: "true" for name, holds in marks.items() if holds})
        return image


@contextmanager
def opened_png(path: Path) -> Iterator[Image.Image]:
    """Temporarily open an image of a run; raise a UserError if it is damaged, too large, or not a regular file."""
    with reading(path, "remove it"):
        require_file(path)
        with Image.open(path, formats=["PNG"]) as file:
            yield file


def read_strip(path: Path) -> Strip:
    """Cut an image that `Strip.write` wrote into its parts."""
    with opened_png(path) as file:
        facts, image = file.info, file.convert("RGB")
        widths = [int(width) for width in facts[PARTS].split()]
        if sum(widths) != image.width or min(widths) < 1:
            raise ValueError("the widths of its parts are not those of the image")
    edges = [sum(widths[:n]) for n in range(len(widths) + 1)]
    parts = [image.crop((left, 0, right, image.height)) for left, right in pairwise(edges)]
    target = None if NO_TARGET in facts else parts.pop()
    *controls, result = parts
    sizes = [(int(width), int(height)) for width, height in re.findall(r"(\d+)x(\d+)", facts.get(SIZES, ""))]
    return Strip(controls, result, target, facts.get("prompt", ""), PRIVATE in facts, sizes)


def file_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a unique file name by sample, also on Windows: at most 240 bytes before an index."""
    names: dict[str, str] = {}
    for index, key in enumerate(keys):
        name = short_name(key.translate(dict.fromkeys(map(ord, '/\\:*?"<>|'), "_")), 240)
        names[key] = f"{name}-{index}" if name in names.values() else name
    return names


def sample_files(run: RunFolder, last: float = math.inf) -> dict[int, dict[str, Path]]:
    """Return a run's sample images up to a step, by step and name."""
    folders = {step: folder for step, folder in run.sampled_steps().items() if step <= last}
    return {
        step: {path.stem: path for path in sorted(folder.glob("*.png")) if path.name.isprintable()}
        for step, folder in folders.items()
    }


def sample_rows(samples: Mapping[int, Mapping[str, Path]], address: Callable[[Path, int], str]) -> list[dict[str, Any]]:
    """Return the rows of a page: the last image of each sample, with its results, named, at all steps in one column.

    Args:
        samples: result of `sample_files`.
        address: returns the address of a part of a file by its index, for the page.
    """
    rows = []
    for name, path in {name: path for files in samples.values() for name, path in files.items()}.items():
        with opened_png(path) as file:  # its text; no pixels are decoded
            facts, height, widths = file.info, file.height, list(map(int, file.info[PARTS].split()))
        prompt, has_target = facts.get("prompt", ""), NO_TARGET not in facts
        count = len(widths) - has_target - 1
        results = [
            (address(files[name], count), f"after step {step}" if step else "before") if name in files else None
            for step, files in samples.items()
        ]
        rows.append(
            {
                "name": name,
                "prompt": prompt if has_target else f"{prompt} (of sample_root)",
                "controls": [address(path, index) for index in range(count)],
                "columns": [results],
                "target": address(path, count + 1) if has_target else "",
                "size": "small" if max(widths[count], height) <= THUMBNAIL else "",
            }
        )
    return rows


def compared_rows(runs: Mapping[str, tuple[Sequence[int], list[dict[str, Any]]]]) -> tuple[list[int], list[Any]]:
    """Return all steps of several runs, and a row for each sample: a column of results for each run.

    A run that has no images of a step shows those of its last one before. Each has its steps and `sample_rows`.
    """
    steps = sorted({step for own, _ in runs.values() for step in own})
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for index, (run, (own, found)) in enumerate(runs.items()):
        for row in found:
            shown = rows.setdefault((row["name"], row["prompt"]), row | {"columns": [[] for _ in runs]})
            results = {step: result for step, result in zip(own, row["columns"][0], strict=True) if result}
            at = [max((one for one in results if one <= step), default=None) for step in steps]
            shown["columns"][index] = [one is not None and (results[one][0], f"{run}, step {one}") for one in at]
    return steps, list(rows.values())


def last_strips(run: RunFolder, last: float = math.inf) -> Iterator[Strip]:
    """Yield the sample images of a run's last step, or of the last one up to a step; edited images first."""
    samples = sample_files(run, last)
    from_text = []
    for strip in map(read_strip, samples[max(samples)].values() if samples else ()):
        if strip.controls:
            yield strip
        else:
            from_text.append(strip)
    yield from from_text


def write_grid(
    run: RunFolder, path: Path, last: float = math.inf, most: int | None = None, public: bool = False
) -> bool:
    """Draw control, before, after and target of each sample, one sample a row; return whether there are any.

    Args:
        last: step of the results at most.
        most: samples, counted from the first.
        public: without those that are not published.
    """
    samples = sample_files(run, last)
    if len(samples) < 2 or 0 not in samples:  # a run that started from a checkpoint elsewhere has no images of the base
        return False
    first, rows = samples[0], []
    for name, path_after in samples[max(samples)].items():
        strip = read_strip(path_after)
        if name in first and strip.target is not None and not (public and strip.private):
            several = len(strip.controls) > 1
            images = {f"control {n}" if several else "control": one for n, one in enumerate(strip.controls, start=1)}
            images |= {"before": read_strip(first[name]).result, "after": strip.result, "target": strip.target}
            rows.append(labelled_row(images))
    if not rows:
        return False
    rows = rows[:most]
    grid = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "white")
    for index, row in enumerate(rows):
        grid.paste(row, (0, sum(above.height for above in rows[:index])))
    save_png(grid, path)
    return True


def data_url(image: Image.Image, largest: int = LARGEST) -> str:
    """Encode an image for a page: exact if it is small, scaled and compressed if it is large."""
    exact = max(image.size) <= THUMBNAIL
    image = image.copy()
    image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG" if exact else "WEBP", **({} if exact else {"quality": 85}))
    kind = "png" if exact else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_figure(figure: "Figure", path: Path, dpi: int = 100) -> None:
    """Write a plot as PNG; a character that the font lacks becomes a box, without a warning."""
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")
        figure.savefig(temporary, format="png", dpi=dpi)


def plot_text(text: str) -> str:
    """Escape the dollar signs between which matplotlib expects mathematics."""
    return text.replace("$", r"\$")
