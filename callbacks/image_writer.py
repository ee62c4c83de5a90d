"""Predicted images: PNG files, a line each in predictions.jsonl, and a strip of several LoRA scales."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from datamodules.edits import EditRequest
from foundation.files import short_name
from report.images import labelled_row, save_png, to_image

log = logging.getLogger("retouch")

# File with a line of JSON for each image.
PREDICTIONS = "predictions.jsonl"
# Folder with the images at all LoRA scales side by side, for each prompt and seed.
STRIPS = "strips"


def log_image(trainer: L.Trainer, name: str, image: Image.Image) -> None:
    """Log an image of the present step with every logger that accepts images."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(image), trainer.global_step, dataformats="HWC")
        elif hasattr(logger, "log_image"):  # as of Weights & Biases
            logger.log_image(name, [image], step=trainer.global_step)


class ImageWriter(L.Callback):
    """Write each image as soon as it is sampled, and those of several LoRA scales also in a row."""

    def __init__(self, output_dir: str) -> None:
        self.folder = Path(output_dir)

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: EditRequest, *args: Any
    ) -> None:
        made: dict[str, dict[float, Path]] = {}  # for each prompt and seed the files, by scale
        for pixels, record in outputs:
            path = self.folder / f"{short_name(record['name'], 251)}.png"
            save_png(to_image(pixels), path)
            log.info(f"{path}  {sum(record['seconds'][name] for name in ('denoise', 'decode')):.2f} s")
            # One short write at the end of the file: several processes may share it.
            with (self.folder / PREDICTIONS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"file": path.name, **record}, ensure_ascii=False) + "\n")
            if len(batch.lora_scales) > 1:
                name = record["name"].rpartition("_lora")[0]
                of_scales = made.setdefault(name, {})
                of_scales[record["lora_scale"]] = path
                if len(of_scales) == len(batch.lora_scales):
                    self._write_strip(name, batch, of_scales)

    def _write_strip(self, name: str, request: EditRequest, files: Mapping[float, Path]) -> None:
        """Write the edited image, if there is one, and the results by scale."""
        images = {"image": to_image(request.raw.controls[0])} if request.raw.controls else {}
        for scale, file in files.items():
            with Image.open(file) as image:
                images[f"{scale:g}"] = image.copy()
        path = self.folder / STRIPS / f"{short_name(name, 251)}.png"
        path.parent.mkdir(exist_ok=True)
        save_png(labelled_row(images), path)
        log.info(f"{path}  lora_scale {', '.join(map('{:g}'.format, files))}")
