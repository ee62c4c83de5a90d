"""What will be trained on, in one picture."""

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from torch import Tensor

from callbacks.image_writer import to_image
from datamodules.batch import RawBatch
from datamodules.files import replacing
from datamodules.pairs import PairsDataModule
from datamodules.pixels import pictures

COLUMNS = 4


def write_contact_sheet(data: PairsDataModule, path: Path) -> None:
    """The first data.preview_count samples as the model will see them, with caption, size and bucket, as a PNG.

    A bucket is what a batch is made of: samples of one size, with like controls and masks.

    Args:
        data: whose samples are known.
    """
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    buckets = {size: number for number, size in enumerate(dict.fromkeys(data.sizes), 1)}
    shown = data.pixels(data.preview_count)
    rows = -(-len(shown) // COLUMNS)
    columns = min(COLUMNS, len(shown))
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.4 * rows + 1), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, raw, size in zip(axes.flat, shown, data.sizes, strict=False):
        axis.imshow(_strip(raw))
        sizes = " + ".join(f"{image.shape[-1]}x{image.shape[-2]}" for image in pictures(raw))
        key = raw.keys[0] if len(raw.keys[0]) <= 44 else f"...{raw.keys[0][-41:]}"
        axis.set_title(f"{_plain(key)}\n{sizes}  bucket {buckets[size]}", fontsize=9)
        caption = textwrap.fill(raw.prompts[0] or "(no caption)", 52, max_lines=3, placeholder=" ...")
        axis.text(0.5, -0.04, _plain(caption), transform=axis.transAxes, ha="center", va="top", fontsize=9)
    counts = ", ".join(f"{n} of {width}x{height}" for (width, height), n in data.size_counts().most_common(6))
    roots = ", ".join(map(str, data.roots))
    lines = [f"{len(shown)} of {len(data.sizes)} {data.noun} of {roots}: {counts}; {len(buckets)} buckets", *data.notes]
    figure.suptitle("\n".join(textwrap.shorten(_plain(line), 50 * columns) for line in lines), fontsize=10)
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
    plt.close(figure)


def _plain(text: str) -> str:
    """Matplotlib sets what stands between dollars as mathematics."""
    return text.replace("$", r"\$")


def _strip(raw: RawBatch) -> np.ndarray:
    """Controls, target and mask in a row, each as high as the target."""
    images: list[Tensor] = pictures(raw)
    if raw.mask is not None:
        images = [*images, (raw.mask * 2 - 1).expand(-1, 3, -1, -1)]
    opened = [to_image(image) for image in images]
    height = pictures(raw)[-1].shape[-2]
    gap = np.full((height, max(2, height // 50), 3), 255, np.uint8)
    parts = []
    for image in opened:
        parts += [np.asarray(image.resize((round(image.width * height / image.height), height))), gap]
    return np.concatenate(parts[:-1], axis=1)
