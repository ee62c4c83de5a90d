"""What will be trained on, in one picture."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageDraw

from datamodules.batch import RawBatch
from datamodules.images.decoding import open_image
from datamodules.images.framing import Size, View
from datamodules.images.samples import Picture
from datamodules.images.windows import Window
from datamodules.pairs import PairsDataModule
from report.images import in_a_row, plot_text, to_image, write_figure

COLUMNS = 4


def write_contact_sheet(data: PairsDataModule, path: Path) -> None:
    """The first data.preview_count samples as the model will see them, with caption, size and bucket, as a PNG.

    Args:
        data: whose samples are known.
    """
    write_figure(contact_sheet(data), path)


def contact_sheet(data: PairsDataModule) -> Figure:
    """A bucket is what a batch is made of: samples of one size, with like controls and masks."""
    counts = Counter(data.sizes)
    buckets = {size: number for number, (size, _) in enumerate(counts.most_common(), 1)}
    shown = data.pixels(data.preview_count)
    views = [data.views[index] for index in data.leading]
    rows = -(-len(shown) // COLUMNS)
    columns = min(COLUMNS, len(shown))
    lines = [f"{len(shown)} of {data.describe()}; {len(buckets)} bucket{'' if len(buckets) == 1 else 's'}", *data.notes]
    title = [part for line in lines for part in textwrap.wrap(line, 52 * columns, max_lines=3)]
    # In inches: what stands above a picture, a picture, and what stands below; and the buckets' shapes above all.
    head, high, foot = 0.45, 2.2, 0.8
    shapes = 1.3 if len(buckets) > 1 else 0
    above = 0.2 * len(title) + 0.1 + shapes
    height = above + rows * (head + high + foot)
    figure = Figure(figsize=(4.2 * columns, height))
    figure.suptitle(plot_text("\n".join(title)), fontsize=10, y=1 - 0.1 / height)
    axes = figure.subplots(rows, columns, squeeze=False)
    edges = {"left": 0.01, "right": 0.99, "wspace": 0.03}
    figure.subplots_adjust(top=1 - (above + head) / height, bottom=foot / height, hspace=(head + foot) / high, **edges)
    if shapes:
        _draw_buckets(
            figure.add_axes((0.01, 1 - above / height, 0.98, shapes / height)), counts.most_common(5 * columns)
        )
    for axis in axes.flat:
        axis.axis("off")
    for axis, raw, view in zip(axes.flat, shown, views, strict=False):
        axis.imshow(_strip(raw, view))
        sizes = " + ".join(f"{image.shape[-1]}x{image.shape[-2]}" for image in raw.images)
        key = raw.keys[0] if len(raw.keys[0]) <= 44 else f"...{raw.keys[0][-41:]}"
        cropped = f", {100 * view.cropped:.1f} % cropped" if view.cropped else ""
        axis.set_title(f"{plot_text(key)}\n{sizes}  bucket {buckets[view.size]}{cropped}", fontsize=9)
        first, *others = view.sample.prompts
        words = (first or "(no caption)") + (f" (and {len(others)} more)" if others else "")
        caption = textwrap.fill(words, 52, max_lines=3, placeholder=" ...")
        axis.text(0.5, -0.04, plot_text(caption), transform=axis.transAxes, ha="center", va="top", fontsize=9)
    return figure


def _draw_buckets(axes: Axes, counts: Sequence[tuple[Size, int]]) -> None:
    """The shapes of the largest buckets' targets, all on one scale, with what they hold."""
    axes.axis("off")
    longest = max(max(images[0]) for (images, _), _ in counts)
    for number, ((images, _), count) in enumerate(counts):
        width, height = (0.8 * side / longest for side in images[0])
        axes.add_patch(Rectangle((number + 0.5 - width / 2, -height / 2), width, height, fc="#dce6f2", ec="#4a6fa5"))
        axes.text(number + 0.5, 0, str(count), ha="center", va="center", fontsize=9)
        label = f"{number + 1}: {images[0][0]}x{images[0][1]}"
        axes.text(number + 0.5, -0.46, label, ha="center", va="top", fontsize=7)
    axes.set(xlim=(0, max(len(counts), 10)), ylim=(-0.62, 0.45), aspect="equal")


def _strip(raw: RawBatch, view: View) -> np.ndarray:
    """Controls, target, mask and rejected in a row, as high as the target; what is cropped away around them is pale."""
    windows, sample = [*view.windows[1:], view.windows[0]], view.sample
    files = [*sample.controls, sample.target]
    images = [_whole(*one) for one in zip(map(to_image, raw.images), files, windows, strict=True)]
    if raw.mask is not None:
        images.append(to_image((raw.mask * 2 - 1).expand(-1, 3, -1, -1)))
    if raw.rejected is not None:
        images.append(to_image(raw.rejected))
    row = in_a_row(images)
    gap = np.full((row[-1].height, max(2, row[-1].height // 50), 3), 255, np.uint8)
    return np.concatenate([part for image in row for part in (np.asarray(image), gap)][:-1], axis=1)


def _whole(seen: Image.Image, file: Picture, window: Window) -> Image.Image:
    """A picture with what is cropped away of it, pale, around what is seen."""
    if not window.cropped:
        return seen
    width, height = window.frame
    whole = Window.whole(window.frame, window.flipped).of(open_image(file, width * height))
    whole = Image.blend(whole, Image.new("RGB", whole.size, "white"), 0.7)
    left, top, right, bottom = window.box
    if window.flipped:
        left, right = width - right, width - left
    whole.paste(seen.resize((right - left, bottom - top)), (left, top))
    ImageDraw.Draw(whole).rectangle((left, top, right - 1, bottom - 1), outline="#ff2d2d", width=max(2, width // 200))
    return whole
