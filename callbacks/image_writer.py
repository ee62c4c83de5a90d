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

from datamodules.files import replacing

log = logging.getLogger("retouch")


def to_image(pixels: Tensor) -> Image.Image:
    """(1, 3, H, W) in [-1, 1] -> 8 bit, rounded as diffusers rounds."""
    array = (pixels[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).float().cpu().numpy()
    return Image.fromarray((array * 255).round().astype("uint8"))


def save_png(image: Image.Image, path: Path, facts: Mapping[str, str] | None = None) -> None:
    """Write the picture whole or not at all, with texts by name."""
    info = PngInfo()
    for name, text in (facts or {}).items():
        info.add_itxt(name, text)
    with replacing(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=info)


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
            path = self.folder / f"{record['name']}.png"
            save_png(to_image(pixels), path)
            log.info(f"{path}  {sum(record['seconds'][name] for name in ('denoise', 'decode')):.2f} s")
            # One short write at the end of the file: several processes may share it.
            with (self.folder / "predictions.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"file": path.name, **record}, ensure_ascii=False) + "\n")
