"""What will be trained on, in one picture."""

import textwrap
import warnings
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from callbacks.image_writer import in_a_row, to_image
from datamodules.batch import RawBatch
from datamodules.files import replacing
from datamodules.images.dataset import pictures
from datamodules.pairs import PairsDataModule

COLUMNS = 4


def write_contact_sheet(data: PairsDataModule, path: Path) -> None:
    """The first data.preview_count samples as the model will see them, with caption, size and bucket, as a PNG.

    Args:
        data: whose samples are known.
    """
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph ")  # a character that the font lacks is drawn as a box
        contact_sheet(data).savefig(temporary, format="png", dpi=100)


def contact_sheet(data: PairsDataModule) -> Figure:
    """A bucket is what a batch is made of: samples of one size, with like controls and masks."""
    buckets = {size: number for number, size in enumerate(dict.fromkeys(data.sizes), 1)}
    shown = data.pixels(data.preview_count)
    rows = -(-len(shown) // COLUMNS)
    columns = min(COLUMNS, len(shown))
    counts = ", ".join(f"{n} of {width}x{height}" for (width, height), n in data.size_counts().most_common(6))
    roots = ", ".join(map(str, data.roots))
    lines = [f"{len(shown)} of {len(data.sizes)} {data.noun} of {roots}: {counts}; {len(buckets)} buckets", *data.notes]
    title = [part for line in lines for part in textwrap.wrap(line, 52 * columns, max_lines=3)]
    # In inches: what stands above a picture, a picture, and what stands below.
    head, high, foot = 0.45, 2.2, 0.8
    above = 0.2 * len(title) + 0.1
    height = above + rows * (head + high + foot)
    figure = Figure(figsize=(4.2 * columns, height))
    figure.suptitle(_plain("\n".join(title)), fontsize=10, y=1 - 0.1 / height)
    axes = figure.subplots(rows, columns, squeeze=False)
    edges = {"left": 0.01, "right": 0.99, "wspace": 0.03}
    figure.subplots_adjust(top=1 - (above + head) / height, bottom=foot / height, hspace=(head + foot) / high, **edges)
    for axis in axes.flat:
        axis.axis("off")
    for axis, raw, size in zip(axes.flat, shown, data.sizes, strict=False):
        axis.imshow(_strip(raw))
        sizes = " + ".join(f"{image.shape[-1]}x{image.shape[-2]}" for image in pictures(raw))
        key = raw.keys[0] if len(raw.keys[0]) <= 44 else f"...{raw.keys[0][-41:]}"
        axis.set_title(f"{_plain(key)}\n{sizes}  bucket {buckets[size]}", fontsize=9)
        caption = textwrap.fill(raw.prompts[0] or "(no caption)", 52, max_lines=3, placeholder=" ...")
        axis.text(0.5, -0.04, _plain(caption), transform=axis.transAxes, ha="center", va="top", fontsize=9)
    return figure


def _plain(text: str) -> str:
    """Matplotlib sets what stands between dollars as mathematics."""
    return text.replace("$", r"\$")


def _strip(raw: RawBatch) -> np.ndarray:
    """Controls, target and mask in a row, each as high as the target."""
    images: list[Tensor] = pictures(raw)
    if raw.mask is not None:
        images = [*images, (raw.mask * 2 - 1).expand(-1, 3, -1, -1)]
    row = in_a_row([to_image(image) for image in images])
    gap = np.full((row[-1].height, max(2, row[-1].height // 50), 3), 255, np.uint8)
    return np.concatenate([part for image in row for part in (np.asarray(image), gap)][:-1], axis=1)
