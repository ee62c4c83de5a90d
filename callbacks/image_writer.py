"""Predicted pictures to PNG files and a line each in predictions.jsonl."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import BasePredictionWriter
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from datamodules.files import replacing, short_name

log = logging.getLogger("retouch")

# In a prediction's folder: a line of JSON for each picture.
PREDICTIONS = "predictions.jsonl"
LONGEST = 4096  # pixels of a side, beside other pictures


def to_image(pixels: Tensor) -> Image.Image:
    """(1, 3, H, W) in [-1, 1] -> 8 bit, rounded as diffusers rounds; black where it is not a number."""
    array = (pixels[0] / 2 + 0.5).nan_to_num(0.0).clamp(0, 1).permute(1, 2, 0).float().cpu().numpy()
    return Image.fromarray((array * 255).round().astype("uint8"))


def save_png(image: Image.Image, path: Path, facts: Mapping[str, str] | None = None) -> None:
    """Write the picture whole or not at all, with texts by name."""
    info = PngInfo()
    for name, text in (facts or {}).items():
        info.add_itxt(name, text)
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=info)


def scaled(image: Image.Image, factor: float, resample: Image.Resampling = Image.Resampling.LANCZOS) -> Image.Image:
    """In proportion, and at least a pixel each way."""
    width, height = (max(1, round(side * factor)) for side in image.size)
    return image if (width, height) == image.size else image.resize((width, height), resample)


def in_a_row(images: Sequence[Image.Image]) -> list[Image.Image]:
    """Each as high as the last, and none longer than LONGEST; what would become a long band is one between bars."""
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


class ImageWriter(BasePredictionWriter):
    """Writes each picture as soon as it is made.

    Args:
        output_dir: the prediction's folder.
    """

    def __init__(self, output_dir: str) -> None:
        super().__init__(write_interval="batch")
        self.folder = Path(output_dir)

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        for pixels, record in prediction:
            path = self.folder / f"{short_name(record['name'], 251)}.png"
            save_png(to_image(pixels), path)
            log.info(f"{path}  {sum(record['seconds'][name] for name in ('denoise', 'decode')):.2f} s")
            # One short write at the end of the file: several processes may share it.
            with (self.folder / PREDICTIONS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"file": path.name, **record}, ensure_ascii=False) + "\n")
