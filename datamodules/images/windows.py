"""Which part of a picture is seen, and at what size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datamodules.images.decoding import floor_size, open_image, shrunk, size_of_area, to_tensor
from datamodules.images.samples import Picture


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


# A control whose proportions differ by no more shows the same view as its target.
SAME_PROPORTIONS = 0.02


@dataclass(frozen=True)
class ConditionImages:
    """How many condition images a model takes, and at what size its encoders see them.

    Attributes:
        most: how many a sample may have; None for any number, 0 for text-to-image models.
        least: how many prediction needs. Training needs at least one unless `most` is 0.
        vae_image_size: area in pixels that each is resized to for the autoencoder, keeping its aspect ratio, and a
            target of its proportions with it; None for its own size, floored to 16.
        condition_image_size: the same for the text encoder; None if that sees no images.
        most_area: the autoencoder sees none of more pixels; larger ones are shrunk to it, their sides rounded down.
        crops: whether its own size is floored by cropping the edges, instead of resizing.
    """

    most: int | None = None
    least: int = 0
    vae_image_size: int | None = None
    condition_image_size: int | None = None
    most_area: int | None = None
    crops: bool = False

    @property
    def text_sees_them(self) -> bool:
        """Whether the text encoder sees the condition images, so that samples cannot share a prompt's conditioning."""
        return self.condition_image_size is not None

    @property
    def limit(self) -> str:
        """`most`, for messages."""
        return f"{self.most} condition image{'' if self.most == 1 else 's'}"

    def size(self, width: int, height: int, max_area: int | None = None) -> tuple[int, int]:
        """Return the (width, height) that the autoencoder sees, of at most about `max_area` pixels."""
        if self.vae_image_size is not None:
            return self._of_area(width, height, min(self.vae_image_size, max_area or self.vae_image_size))
        return floor_size(*self._bounded(width, height, max_area))

    def _of_area(self, width: int, height: int, area: int) -> tuple[int, int]:
        """Return the sides of about `area` pixels in the same proportions, rounded as the pipeline rounds them."""
        return size_of_area(width, height, area)

    @property
    def sets_target(self) -> bool:
        """Whether the pipeline's result has the grid of the condition image.

        Positions are centred or counted from the corner: on grids that differ, a target and its control of the same
        view would teach a zoom.
        """
        return self.vae_image_size is not None

    def window(self, width: int, height: int, max_area: int | None = None, flipped: bool = False) -> Window:
        """What the autoencoder sees of a picture; arguments as of `size`."""
        size = self.size(width, height, max_area)
        if not self.crops:
            return Window.whole(size, flipped)
        return Window.center(self._bounded(width, height, max_area), size, flipped)

    def narrowed(self, window: Window) -> Window:
        """What the autoencoder sees of what a window shows."""
        size = self.size(*window.size)
        if not self.crops:
            return window._replace(size=size)
        left, top, right, bottom = window.box
        across, down = (
            round(side * (1 - seen / whole) / 2)
            for side, seen, whole in zip(window.seen, size, self._bounded(*window.size), strict=True)
        )
        return window._replace(box=(left + across, top + down, right - across, bottom - down), size=size)

    def _bounded(self, width: int, height: int, max_area: int | None = None) -> tuple[int, int]:
        if self.most_area is not None:
            width, height = shrunk(width, height, self.most_area, int)
        return (width, height) if max_area is None else shrunk(width, height, max_area)

    def load(self, paths: Sequence[Picture], windows: Sequence[Window]) -> tuple[list[Tensor], list[Tensor]]:
        """The images for the autoencoder, each (1, 3, h, w) in [-1, 1], and for the text encoder, as `for_text`.

        Args:
            windows: what is seen of each, at the autoencoder's size.

        Raises:
            UserError: a file is unreadable.
        """
        used = [max(window.frame[0] * window.frame[1], self.condition_image_size or 0) for window in windows]
        images = [open_image(path, area) for path, area in zip(paths, used, strict=True)]
        pixels = [to_tensor(window.of(image))[None] for window, image in zip(windows, images, strict=True)]
        return pixels, self._for_text(images, windows)

    def for_text(self, paths: Sequence[Picture]) -> list[Tensor]:
        """Whole images for the text encoder, each (3, h, w) in 8 bits; none if it sees no images."""
        if self.condition_image_size is None:
            return []
        images = [open_image(path) for path in paths]
        return self._for_text(images, [Window.whole(image.size) for image in images])

    def _for_text(self, images: Iterable[Image.Image], windows: Iterable[Window]) -> list[Tensor]:
        area = self.condition_image_size
        if area is None:
            return []
        # The size of a whole picture follows from its own proportions, not from the autoencoder's rounded ones.
        small = [
            window.of(image, size_of_area(*(window.seen if window.cropped else image.size), area))
            for image, window in zip(images, windows, strict=True)
        ]
        return [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in small]
