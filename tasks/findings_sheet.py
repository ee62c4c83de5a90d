"""What task=inspect found, in one picture."""

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageChops, ImageOps

from datamodules.errors import UserError
from datamodules.files import replacing
from datamodules.images.findings import Finding, Kind
from datamodules.images.sample import Picture, Sample
from datamodules.images.transforms import open_image, resize

COLUMNS, PANELS = 2, 3
# In pixels: the box of a picture, and what is between two.
BOX, GAP = (400, 300), 10
# How much stronger a difference is shown than it is.
STRONGER = 8
# Pixels of a target's side that are shown as they are.
DETAIL = 128
# Letters in a line above a row of pictures.
LETTERS = 92

Panel = tuple[str, Image.Image]


def write_findings_sheet(found: Sequence[Finding], most: int, path: Path) -> None:
    """Up to `most` samples with what is wrong with them, of each kind the first ones, as a PNG."""
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")  # a character that the font lacks is drawn as a box
        _sheet(_choose(found, most)).savefig(temporary, format="png", dpi=100)


def _choose(found: Sequence[Finding], most: int) -> list[list[Finding]]:
    """The findings of some samples; each kind is there before any kind is there twice."""
    of_sample: dict[Sample, list[Finding]] = {}
    place: dict[Sample, tuple[int, int]] = {}
    count: dict[Kind, int] = {}
    for number, finding in enumerate(found):
        if finding.sample is not None:
            of_sample.setdefault(finding.sample, []).append(finding)
            count[finding.kind] = count.get(finding.kind, 0) + 1
            place[finding.sample] = min(place.get(finding.sample, (len(found), 0)), (count[finding.kind], number))
    chosen = sorted(of_sample, key=lambda sample: place[sample])[:most]
    return [of_sample[sample] for sample in of_sample if sample in chosen]


def _sheet(samples: Sequence[list[Finding]]) -> Figure:
    rows, columns = -(-len(samples) // COLUMNS), min(COLUMNS, len(samples))
    # In inches: a row of pictures, and what stands above and below it.
    wide, high, head, foot = 8.0, 8.0 * BOX[1] / (PANELS * BOX[0]), 0.72, 0.42
    height = rows * (head + high + foot)
    figure = Figure(figsize=(wide * columns, height))
    axes = figure.subplots(rows, columns, squeeze=False)
    edges = {"left": 0.012, "right": 0.988, "wspace": 0.04}
    figure.subplots_adjust(top=1 - head / height, bottom=foot / height, hspace=(head + foot) / high, **edges)
    for axis in axes.flat:
        axis.axis("off")
    for axis, findings in zip(axes.flat, samples, strict=False):
        sample = findings[0].sample
        assert sample is not None
        panels = _panels(sample, findings[0])
        axis.imshow(_strip([image for _, image in panels]))
        faults = ";  ".join(f"{one.kind.label}: {one.figure}" for one in findings)
        above = {"transform": axis.transAxes, "ha": "left", "va": "bottom"}
        axis.text(0, 1.21, _line(_end(sample.key)), fontsize=9, **above)
        axis.text(0, 1.10, _line(faults), fontsize=10, fontweight="bold", color="firebrick", **above)
        for number, (name, _) in enumerate(panels):
            left = number * (BOX[0] + GAP) / _width(PANELS)
            axis.text(left, 1.01, name, fontsize=8, color="dimgray", **above)
        caption = _line(sample.prompts[0] or "(no caption)")
        axis.text(0, -0.03, caption, fontsize=9, transform=axis.transAxes, ha="left", va="top")
    return figure


def _end(key: str) -> str:
    """A long name's end tells more than its beginning."""
    return key if len(key) <= LETTERS else f"...{key[3 - LETTERS :]}"


def _line(text: str) -> str:
    """One line; matplotlib sets what stands between dollars as mathematics."""
    return textwrap.shorten(text, LETTERS, placeholder=" ...").replace("$", r"\$")


def _panels(sample: Sample, finding: Finding) -> list[Panel]:
    """The control and the target, and what shows the fault."""
    # A file that cannot be read is shown as grey.
    images = {path: _open(path) for path in (*sample.controls, sample.target)}
    target = images[sample.target]
    panels = [("target", target)]
    if sample.controls:
        control = resize(images[sample.controls[0]], target.size)
        panels.insert(0, ("control", images[sample.controls[0]]))
        if finding.kind in (Kind.SHIFTED, Kind.SCALED):
            panels.append(("control red, target cyan", _overlay(control, target)))
        if finding.kind in (Kind.EQUAL, Kind.NEARLY_EQUAL):
            change = ImageChops.difference(control, target)
            panels.append((f"difference x {STRONGER}", change.point(lambda level: min(255, STRONGER * level))))
    if finding.other is not None:
        panels.append(_other(finding.figure, finding.other))
    if finding.kind is Kind.MASK and sample.mask is not None:
        panels.append(("mask", _open(sample.mask)))
    if finding.kind in (Kind.SMALL, Kind.COMPRESSED):
        panels.append((f"{DETAIL} pixels of the target", _detail(sample.target)))
    return panels[:PANELS]


def _other(figure: str, other: Sample) -> Panel:
    """The picture that a sample repeats."""
    what, path = ("control", other.controls[0]) if figure.startswith("control") else ("target", other.target)
    return f"{what} of {textwrap.shorten(other.key[-24:], 24, placeholder='')}", _open(path)


def _open(path: Picture) -> Image.Image:
    try:
        return ImageOps.contain(open_image(path, BOX[0] * BOX[1]), BOX)
    except UserError:
        return Image.new("RGB", BOX, "lightgray")


def _overlay(control: Image.Image, target: Image.Image) -> Image.Image:
    """What is in both is grey; what stands elsewhere has red and cyan borders."""
    red, cyan = (image.convert("L") for image in (control, target))
    return Image.merge("RGB", (red, cyan, cyan))


def _detail(path: Picture) -> Image.Image:
    """The middle of a picture, its own pixels enlarged."""
    image = open_image(path)
    side = min(DETAIL, *image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((BOX[1], BOX[1]), Image.Resampling.NEAREST)


def _width(count: int) -> int:
    return count * BOX[0] + (count - 1) * GAP


def _strip(images: Sequence[Image.Image]) -> np.ndarray:
    """The pictures in boxes of one size, side by side."""
    strip = Image.new("RGB", (_width(PANELS), BOX[1]), "white")
    for number, image in enumerate(images):
        strip.paste(image, (number * (BOX[0] + GAP), (BOX[1] - image.height) // 2))
    return np.asarray(strip)
