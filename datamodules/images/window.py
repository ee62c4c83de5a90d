"""Which part of a picture is seen, and at what size."""

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datamodules.images.sample import Picture
from datamodules.images.transforms import open_image, to_tensor


def resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image resized to (width, height)."""
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


class Window(NamedTuple):
    """Which part of a picture is seen, and at what size.

    Attributes:
        frame: (width, height) that the whole picture would be resized to.
        box: of the frame, what is seen: left, top, right, bottom.
        size: (width, height) of the result: the box's own, but where encoders see another one.
        flipped: whether it is mirrored, left and right exchanged.
    """

    frame: tuple[int, int]
    box: tuple[int, int, int, int]
    size: tuple[int, int]
    flipped: bool = False

    @classmethod
    def whole(cls, size: tuple[int, int], flipped: bool = False) -> "Window":
        """All of a picture at a size."""
        return cls(size, (0, 0, *size), size, flipped)

    @classmethod
    def center(cls, frame: tuple[int, int], size: tuple[int, int], flipped: bool = False) -> "Window":
        """As much as `size` of the middle of a picture that is resized to `frame`."""
        left, top = ((whole - seen) // 2 for whole, seen in zip(frame, size, strict=True))
        return cls(frame, (left, top, left + size[0], top + size[1]), size, flipped)

    @property
    def seen(self) -> tuple[int, int]:
        """(width, height) of the box."""
        left, top, right, bottom = self.box
        return right - left, bottom - top

    @property
    def cropped(self) -> float:
        """The share of the picture that is not seen."""
        (width, height), (whole_width, whole_height) = self.seen, self.frame
        return 1 - width * height / (whole_width * whole_height)

    def of(self, image: Image.Image, size: tuple[int, int] | None = None, mask: bool = False) -> Image.Image:
        """What is seen of a picture of any size, at `size` instead of the window's own.

        Pictures are resized by Lanczos's filter, masks linearly, which does not overshoot.
        """
        across, down = (side / whole for side, whole in zip(image.size, self.frame, strict=True))
        left, top, right, bottom = self.box
        box = (left * across, top * down, right * across, bottom * down)
        size = size or self.size
        if mask or self.cropped:
            image = image.resize(size, Image.Resampling.BILINEAR if mask else Image.Resampling.LANCZOS, box=box)
        else:
            image = resize(image, size)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.flipped else image


def load_image(path: Picture, window: Window) -> Tensor:
    """What is seen of the file, as (3, H, W) in [-1, 1]."""
    return to_tensor(window.of(open_image(path, window.frame[0] * window.frame[1])))


def load_mask(path: Picture, window: Window) -> Tensor:
    """The brightness of what is seen of the file, as (1, H, W) in [0, 1]: white counts, black does not."""
    mask = window.of(open_image(path, in_srgb=False).convert("L"), mask=True)
    return torch.from_numpy(np.array(mask, dtype=np.float32))[None] / 255
