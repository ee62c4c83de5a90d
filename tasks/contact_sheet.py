"""Sheets of images: the samples as training sees them, and panels with a title and a caption each."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from datamodules.batch import RawBatch
from datamodules.pairs import PairsDataModule
from foundation.errors import count_of
from report.images import in_a_row, plot_text, to_image

PANELS_PER_ROW = 4


class Panel(NamedTuple):
    """An image of a sheet, its title of two lines, and its caption."""

    image: np.ndarray
    title: str
    caption: str


def draw_panels(
    panels: Sequence[Panel], columns: int, width: float, height: float, heading: Sequence[str] = ()
) -> Figure:
    """Draw panels in a grid.

    Args:
        width, height: size of an image in inches.
        heading: lines above all.
    """
    head, foot, rows, above = 0.45, 0.8, -(-len(panels) // columns), 0.2 * len(heading) + 0.1
    total = above + rows * (head + height + foot)
    figure = Figure(figsize=(width * columns, total))
    figure.suptitle(plot_text("\n".join(heading)), fontsize=10, y=1 - 0.1 / total)
    axes = figure.subplots(rows, columns, squeeze=False)
    edges = {"left": 0.01, "right": 0.99, "wspace": 0.03, "hspace": (head + foot) / height}
    figure.subplots_adjust(top=1 - (above + head) / total, bottom=foot / total, **edges)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (image, title, caption) in zip(axes.flat, panels, strict=False):
        axis.imshow(image)
        axis.set_title(plot_text(title), fontsize=9)
        text = textwrap.fill(caption or "(no caption)", round(12.4 * width), max_lines=3, placeholder=" ...")
        axis.text(0.5, -0.04, plot_text(text), transform=axis.transAxes, ha="center", va="top", fontsize=9)
    return figure


def contact_sheet(data: PairsDataModule) -> Figure:
    """Draw the first data.preview_count samples as the model will see them, with caption and sizes."""
    panels = []
    split, shown = data.training, slice(data.preview_count)
    for raw, index in zip(data.pixels(split, shown), split.leading[shown], strict=False):
        view = split.views[index]
        sizes = " + ".join(f"{image.shape[-1]}x{image.shape[-2]}" for image in raw.images)
        key = raw.keys[0] if len(raw.keys[0]) <= 44 else f"...{raw.keys[0][-41:]}"
        cropped = f", {100 * view.cropped:.1f} % cropped" if view.cropped else ""
        first, *others = view.sample.prompts
        caption = (first or "(no caption)") + (f" (and {len(others)} more)" if others else "")
        panels.append(Panel(_strip(raw), f"{key}\n{sizes}{cropped}", caption))
    columns = min(PANELS_PER_ROW, len(panels))
    first_line = f"{len(panels)} of {data.describe()}; {count_of(len(set(split.sizes)), 'buckets')}"
    heading = [part for line in (first_line, *data.notes) for part in textwrap.wrap(line, 52 * columns, max_lines=3)]
    return draw_panels(panels, columns, 4.2, 2.2, heading)


def _strip(raw: RawBatch) -> np.ndarray:
    """Draw controls, target, mask and rejected image in a row, as high as the target."""
    images = list(map(to_image, raw.images))
    if raw.mask is not None:
        images.append(to_image((raw.mask * 2 - 1).expand(-1, 3, -1, -1)))
    if raw.rejected is not None:
        images.append(to_image(raw.rejected))
    row = in_a_row(images)
    gap = np.full((row[-1].height, max(2, row[-1].height // 50), 3), 255, np.uint8)
    return np.concatenate([part for image in row for part in (np.asarray(image), gap)][:-1], axis=1)
