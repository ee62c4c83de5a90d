"""Predicted pictures to PNG files and a line each in predictions.jsonl."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import BasePredictionWriter
from PIL import Image
from torch import Tensor

from datamodules.files import replacing

log = logging.getLogger("retouch")


def to_image(pixels: Tensor) -> Image.Image:
    """(1, 3, H, W) in [-1, 1] -> 8 bit, rounded as diffusers rounds."""
    array = (pixels[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).float().cpu().numpy()
    return Image.fromarray((array * 255).round().astype("uint8"))


def save_png(image: Image.Image, path: Path) -> None:
    """Write the picture whole or not at all."""
    with replacing(path) as temporary:
        image.save(temporary, format="PNG")


class ImageWriter(BasePredictionWriter):
    """Writes each picture as soon as it is made.

    Args:
        output_dir: the prediction's folder.
    """

    def __init__(self, output_dir: str) -> None:
        super().__init__(write_interval="batch")
        self.folder = Path(output_dir)
        self.written: list[Path] = []

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
        # Each process has a file of its own, so that no two write into one.
        suffix = f"-{trainer.global_rank}" if trainer.world_size > 1 else ""
        for pixels, record in prediction:
            path = self.folder / f"{record['name']}.png"
            save_png(to_image(pixels), path)
            self.written.append(path)
            log.info(f"{path}  {sum(record['seconds'][name] for name in ('denoise', 'decode')):.2f} s")
            with (self.folder / f"predictions{suffix}.jsonl").open("a") as file:
                file.write(json.dumps({"file": path.name, **record}, ensure_ascii=False) + "\n")
