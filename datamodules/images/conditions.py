"""The condition images of a sample, as the model wants them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datamodules.images.transforms import fit_area, floor_size, image_size, open_image, resize, size_of_area, to_tensor

# A prompt, and the condition images that its text encoder sees with it.
PromptRequest = tuple[str, tuple[Path, ...]]


@dataclass(frozen=True)
class ConditionImages:
    """How many condition images a model takes, and at what size its parts see them.

    Attributes:
        most: how many a sample may have; None for any number, 0 for a model that makes pictures from text alone.
        least: how many prediction needs. In training, a model that takes any needs one.
        vae_image_size: pixels that each is resized to for the autoencoder, in its own proportions; None for its own
            size, floored to 16.
        condition_image_size: the same for the text encoder; None where that sees no images.
    """

    most: int | None = None
    least: int = 0
    vae_image_size: int | None = None
    condition_image_size: int | None = None

    @property
    def text_sees_them(self) -> bool:
        """Whether a prompt's conditioning is one for each sample."""
        return self.condition_image_size is not None

    @property
    def limit(self) -> str:
        """`most` in words."""
        return f"{self.most} condition image{'' if self.most == 1 else 's'}"

    def size(self, width: int, height: int, max_area: int | None = None) -> tuple[int, int]:
        """At what (width, height) the autoencoder sees a picture; `max_area` bounds one that keeps its own size."""
        if self.vae_image_size is not None:
            return size_of_area(width, height, self.vae_image_size)
        return floor_size(width, height) if max_area is None else fit_area(width, height, max_area)

    def load(self, paths: Sequence[Path], max_area: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """The pictures for the autoencoder, each (1, 3, h, w) in [-1, 1], and for the text encoder, as `for_text`.

        Raises:
            UserError: a file is unreadable.
        """
        wanted = [self.vae_image_size or max_area, self.condition_image_size]
        area = None if max_area is None else max(one for one in wanted if one is not None)
        images = [open_image(path, area) for path in paths]
        # By the file's own size, as the result's is: what is decoded may be smaller already.
        sizes = [self.size(*image_size(path), max_area) for path in paths]
        pixels = [to_tensor(resize(image, size))[None] for image, size in zip(images, sizes, strict=True)]
        return pixels, self._for_text(images)

    def for_text(self, paths: Sequence[Path]) -> list[Tensor]:
        """What the text encoder sees of them, each (3, h, w) in 8 bits."""
        return self._for_text(map(open_image, paths)) if self.condition_image_size is not None else []

    def _for_text(self, images: Iterable[Image.Image]) -> list[Tensor]:
        area = self.condition_image_size
        if area is None:
            return []
        small = [resize(image, size_of_area(*image.size, area)) for image in images]
        return [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in small]
