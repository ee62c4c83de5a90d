"""What task=inspect found, in one picture."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageChops, ImageOps

from datamodules.errors import UserError
from datamodules.images.alignment import edges
from datamodules.images.decoding import open_image
from datamodules.images.inspection import Finding, Kind
from datamodules.images.samples import Picture, Sample
from datamodules.images.windows import resize
from report.images import plot_text, write_figure

COLUMNS, PANELS = 2, 3
# In pixels: the box of a picture, and what is between two.
BOX, GAP = (400, 300), 10
# That the name above a narrow picture has room.
LEAST = 110
# How much stronger a difference is shown than it is.
STRONGER = 8
# Pixels of a target's side that are shown as they are.
DETAIL = 128
# Parts a side of a picture: of the outer ones that with the most edges shows a shift or a scale.
PARTS = 4
# Letters in a line above a row of pictures.
LETTERS = 92

Panel = tuple[str, Image.Image]


def write_findings_sheet(found: Sequence[Finding], most: int, path: Path) -> None:
    """Up to `most` samples with what is wrong with them, of each kind the first ones, as a PNG."""
    write_figure(_sheet(_choose(found, most)), path)


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
        axis.text(0, 1.21, _line(end_of(sample.key, LETTERS)), fontsize=9, **above)
        axis.text(0, 1.10, _line(faults), fontsize=10, fontweight="bold", color="firebrick", **above)
        left = 0
        for name, image in panels:
            axis.text(left / _width(PANELS), 1.01, name, fontsize=8, color="dimgray", **above)
            left += max(image.width, LEAST) + GAP
        caption = _line(sample.prompts[0] or "(no caption)")
        axis.text(0, -0.03, caption, fontsize=9, transform=axis.transAxes, ha="left", va="top")
    return figure


def end_of(key: str, letters: int) -> str:
    """A long name's end tells more than its beginning."""
    return key if len(key) <= letters else f"...{key[3 - letters :]}"


def _line(text: str) -> str:
    return plot_text(textwrap.shorten(text, LETTERS, placeholder=" ..."))


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
            panels.append(("edges: control red, target cyan", _overlay(sample, target.size)))
        if finding.kind in (Kind.EQUAL, Kind.NEARLY_EQUAL):
            change = ImageChops.difference(control, target)
            panels.append((f"difference x {STRONGER}", change.point(lambda level: min(255, STRONGER * level))))
    if finding.other is not None:
        panels.append(_other(finding.figure, finding.other))
    if finding.kind is Kind.MASK and sample.mask is not None:
        panels.append(("mask", _open(sample.mask)))
    if finding.kind in (Kind.SMALL, Kind.COMPRESSED):
        panels.append((f"{DETAIL} pixels of the target", _detail(sample.target)))
    return [(name, ImageOps.expand(image, 1, "silver")) for name, image in panels[:PANELS]]


def _other(figure: str, other: Sample) -> Panel:
    """The picture that a sample repeats."""
    what, path = ("control", other.controls[0]) if figure.startswith("control") else ("target", other.target)
    return f"{what} of {end_of(other.key, 24)}", _open(path)


def _open(path: Picture) -> Image.Image:
    try:
        return ImageOps.contain(open_image(path, BOX[0] * BOX[1]), BOX)
    except UserError:
        return Image.new("RGB", BOX, "lightgray")


def _overlay(sample: Sample, size: tuple[int, int]) -> Image.Image:
    """The edges of both in a part of the picture, enlarged to `size`: white where they stand in one place."""
    target = open_image(sample.target, (PARTS * BOX[0]) ** 2)
    control = resize(open_image(sample.controls[0], (PARTS * BOX[0]) ** 2), target.size)
    strengths = [_strength(image) for image in (control, target)]
    high, wide = (max(1, side // PARTS) for side in strengths[1].shape)
    outer = [
        (slice(high * row, high * (row + 1)), slice(wide * column, wide * (column + 1)))
        for row in range(PARTS)
        for column in range(PARTS)
        if row in (0, PARTS - 1) or column in (0, PARTS - 1)
    ]
    part = max(outer, key=lambda place: float(strengths[1][place].mean() * strengths[0][place].mean()))
    red, cyan = (Image.fromarray(strength[part]).resize(size, Image.Resampling.BICUBIC) for strength in strengths)
    return Image.merge("RGB", (red, cyan, cyan))


def _strength(image: Image.Image) -> np.ndarray:
    """Of edges, in 8 bits."""
    found = edges(np.asarray(image.convert("L"), np.float32))
    return (255 * (found / max(float(np.percentile(found, 99)), 1.0)).clip(0, 1)).astype(np.uint8)


def _detail(path: Picture) -> Image.Image:
    """The middle of a picture, its own pixels enlarged."""
    image = open_image(path)
    side = min(DETAIL, *image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((BOX[1], BOX[1]), Image.Resampling.NEAREST)


def _width(count: int) -> int:
    return count * (BOX[0] + 2) + (count - 1) * GAP


def _strip(images: Sequence[Image.Image]) -> np.ndarray:
    """The pictures side by side, on white."""
    strip = Image.new("RGB", (_width(PANELS), BOX[1] + 2), "white")
    left = 0
    for image in images:
        strip.paste(image, (left, 0))
        left += max(image.width, LEAST) + GAP
    return np.asarray(strip)
