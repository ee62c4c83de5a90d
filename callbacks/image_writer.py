"""Predicted pictures to PNG files and a line each in predictions.jsonl; of several LoRA scales a strip, too."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from datamodules.edits import EditRequest
from datamodules.files import replacing, short_name

log = logging.getLogger("retouch")

# In a prediction's folder: a line of JSON for each picture.
PREDICTIONS = "predictions.jsonl"
LONGEST = 4096  # pixels of a side, beside other pictures
# In a prediction's folder: for each prompt and seed the pictures at all LoRA scales, side by side.
STRIPS = "strips"
# Of a strip, in pixels: a picture's longer side at most, about that of tiny ones, between two, and a label's height.
LARGEST, SMALLEST, GAP, LABEL = 512, 128, 6, 18


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


def log_image(trainer: L.Trainer, name: str, image: Image.Image) -> None:
    """Show an image of the present step in every logger that takes images."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(image), trainer.global_step, dataformats="HWC")
        elif hasattr(logger, "log_image"):  # as of Weights & Biases
            logger.log_image(name, [image], step=trainer.global_step)


def strip_of(images: Mapping[str, Image.Image]) -> Image.Image:
    """Pictures in a row, each below its label, and all as high as the last."""
    row = in_a_row(list(images.values()))
    side = max(row[-1].size)
    factor = LARGEST / side if side > LARGEST else max(1, round(SMALLEST / side))
    row = [scaled(image, factor, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS) for image in row]
    above = LABEL + 2 * GAP
    strip = Image.new("RGB", (sum(one.width + GAP for one in row) - GAP, above + row[-1].height), "white")
    canvas, left = ImageDraw.Draw(strip), 0
    for label, image in zip(images, row, strict=True):
        canvas.text((left + image.width / 2, above / 2), label, fill="black", anchor="mm", font_size=LABEL)
        strip.paste(image, (left, above))
        left += image.width + GAP
    return strip


class ImageWriter(BasePredictionWriter):
    """Writes each picture as soon as it is made.

    Args:
        output_dir: the prediction's folder.
        strips: whether the pictures of several LoRA scales are shown in a row, too.
    """

    def __init__(self, output_dir: str, strips: bool) -> None:
        super().__init__(write_interval="batch")
        self.folder = Path(output_dir)
        self.strips = strips

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
        assert isinstance(batch, EditRequest)
        made: dict[str, dict[float, Path]] = {}  # for each prompt and seed the files, by scale
        for pixels, record in prediction:
            path = self.folder / f"{short_name(record['name'], 251)}.png"
            save_png(to_image(pixels), path)
            log.info(f"{path}  {sum(record['seconds'][name] for name in ('denoise', 'decode')):.2f} s")
            # One short write at the end of the file: several processes may share it.
            with (self.folder / PREDICTIONS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"file": path.name, **record}, ensure_ascii=False) + "\n")
            if self.strips:
                name = record["name"].rpartition("_lora")[0]
                of_scales = made.setdefault(name, {})
                of_scales[record["lora_scale"]] = path
                if len(of_scales) == len(batch.lora_scales):
                    self._write_strip(name, batch, of_scales)

    def _write_strip(self, name: str, request: EditRequest, files: Mapping[float, Path]) -> None:
        """The picture that is edited, where there is one, and the results by scale."""
        images = {"image": to_image(request.raw.controls[0])} if request.raw.controls else {}
        for scale, file in files.items():
            with Image.open(file) as image:
                images[f"{scale:g}"] = image.convert("RGB")
        path = self.folder / STRIPS / f"{short_name(name, 251)}.png"
        path.parent.mkdir(exist_ok=True)
        save_png(strip_of(images), path)
        log.info(f"{path}  lora_scale {', '.join(map('{:g}'.format, files))}")
