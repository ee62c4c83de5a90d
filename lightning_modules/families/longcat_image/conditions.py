"""LongCat's condition image: its size for the autoencoder, and half of it for the text encoder."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datamodules.images.decoding import image_size
from datamodules.images.samples import SIDE_MULTIPLE, ImageFile
from datamodules.images.windows import ConditionImages, Window, resize


@dataclass(frozen=True)
class HalvedForText(ConditionImages):
    """The text encoder sees the autoencoder's image at half its width and height."""

    @property
    def text_sees_them(self) -> bool:
        return True

    def _of_area(self, width: int, height: int, area: int) -> tuple[int, int]:
        """Return sides that are rounded up to 16."""
        wide = math.sqrt(area * (width / height))
        high = wide / (width / height)  # in the pipeline's order, to round as it does
        return math.ceil(wide / SIDE_MULTIPLE) * SIDE_MULTIPLE, math.ceil(high / SIDE_MULTIPLE) * SIDE_MULTIPLE

    def for_text(self, paths: Sequence[ImageFile]) -> list[Tensor]:
        return self.load(paths, [self.window(*image_size(path)) for path in paths])[1]

    def _for_text(self, images: Iterable[Image.Image], windows: Iterable[Window]) -> list[Tensor]:
        # Resized twice, as in the pipeline.
        seen = [window.of(image) for image, window in zip(images, windows, strict=True)]
        small = [resize(image, halved(*image.size)) for image in seen]
        return [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in small]


def halved(width: int, height: int) -> tuple[int, int]:
    """Return the size for the text encoder."""
    return width // 2, height // 2
