"""Windows: the part of an image that encoders see, and the sizes at which they see condition images."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datamodules.images.decoding import (
    Sides,
    floor_size,
    open_image,
    open_mask,
    shrunk,
    size_of_area,
    to_bytes,
    to_tensor,
)
from datamodules.images.recipe_images import RecipeImage
from datamodules.images.samples import SIDE_MULTIPLE, ImageFile

# Up to this difference of proportions a control shows the same view as its target.
SAME_PROPORTIONS = 0.02
# The same for an image that is fitted into its target: it is cropped rather than smaller than that.
FITS_EXACTLY = 0.08


def same_proportions(one: Sides, other: Sides) -> bool:
    """Return whether two images have the same proportions, and so may show the same view."""
    return abs(math.log(one[0] / one[1] * other[1] / other[0])) <= SAME_PROPORTIONS


def extends(target: Sides, control: Sides) -> bool:
    """Return whether a target extends its control along one side; the other one is equal, so both have one scale."""
    longer = max(whole / seen for whole, seen in zip(target, control, strict=True))
    return (target[0] == control[0]) != (target[1] == control[1]) and math.log(longer) > SAME_PROPORTIONS


def resize(image: Image.Image, size: Sides) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


class Window(NamedTuple):
    """A part of an image, and its size.

    Attributes:
        frame: (width, height) to which the whole image would be resized.
        box: part of the frame: left, top, right, bottom; around the whole frame it is filled by reflection.
        size: (width, height) of the result; the box's, unless encoders see another one.
        flipped: mirror it horizontally.
    """

    frame: Sides
    box: tuple[int, int, int, int]
    size: Sides
    flipped: bool = False

    @classmethod
    def whole(cls, size: Sides, flipped: bool = False) -> "Window":
        return cls(size, (0, 0, *size), size, flipped)

    @classmethod
    def center(cls, frame: Sides, size: Sides, flipped: bool = False) -> "Window":
        """Return the middle `size` of an image that is resized to `frame`."""
        left, top = ((whole - seen) // 2 for whole, seen in zip(frame, size, strict=True))
        return cls(frame, (left, top, left + size[0], top + size[1]), size, flipped)

    @property
    def seen(self) -> Sides:
        """(width, height) of the box."""
        left, top, right, bottom = self.box
        return right - left, bottom - top

    @property
    def cropped(self) -> float:
        """Share of the image outside the box."""
        (width, height), (whole_width, whole_height) = self.seen, self.frame
        return max(0.0, 1 - width * height / (whole_width * whole_height))

    @property
    def inside(self) -> tuple[int, int, int, int]:
        """Part of an unscaled box that is not reflected: left, top, right, bottom."""
        left, top, right, bottom = self.box
        width, height = self.frame
        return max(0, -left), max(0, -top), min(right, width) - left, min(bottom, height) - top

    def of(self, image: Image.Image, size: Sides | None = None, mask: bool = False) -> Image.Image:
        """Return this part of an image of any size.

        Args:
            size: instead of the window's own.
            mask: resize linearly, which does not overshoot, instead of with Lanczos' filter.
        """
        across, down = (side / whole for side, whole in zip(image.size, self.frame, strict=True))
        left, top, right, bottom = self.box
        box = (left * across, top * down, right * across, bottom * down)
        size = size or self.size
        if self.inside != (0, 0, *self.seen):
            pixels = np.asarray(Window.whole(self.frame).of(image, mask=mask))
            around = (-top, bottom - self.frame[1]), (-left, right - self.frame[0]), (0, 0)
            short = min(self.frame) <= SIDE_MULTIPLE
            image = Image.fromarray(np.pad(pixels, around[: pixels.ndim], mode="symmetric" if short else "reflect"))
        elif mask or self.cropped:
            image = image.resize(size, Image.Resampling.BILINEAR if mask else Image.Resampling.LANCZOS, box=box)
        else:
            image = resize(image, size)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if self.flipped else image


def load_image(path: ImageFile, window: Window, alpha: bool = False) -> Tensor:
    """Return a part of a file as (C, H, W) in [-1, 1]: RGB, with `alpha` RGBA."""
    image, window = _opened_for(path, window, window.frame[0] * window.frame[1], alpha)
    return to_tensor(window.of(image))


def _opened_for(path: ImageFile, window: Window, area: int, alpha: bool) -> tuple[Image.Image, Window]:
    """Decode an image of which a window is needed; return it with the window in it."""
    if not isinstance(path, RecipeImage):
        return open_image(path, area, alpha=alpha), window
    image = open_image(path.image, area, alpha=alpha)
    return _made_for(window, lambda part: path.made_from(part.of(image)))


def _made_for(window: Window, make: Callable[[Window], Image.Image]) -> tuple[Image.Image, Window]:
    """Make the part of an image that a window shows; return it with the window in it, which may pad it."""
    if window.inside == (0, 0, *window.seen):
        return make(window), Window.whole(window.size)
    made = make(Window.whole(window.frame, window.flipped))
    return made.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if window.flipped else made, window


def load_mask(path: ImageFile, window: Window) -> Tensor:
    """Return the brightness of a part of a file as (1, H, W) in [0, 1]."""
    if isinstance(path, RecipeImage):
        mask, window = _made_for(window, lambda part: path.mask(part.size))
    else:
        mask = open_mask(path)
    return torch.from_numpy(np.array(window.of(mask, mask=True), dtype=np.float32))[None] / 255


@dataclass(frozen=True)
class ConditionImages:
    """The number of condition images that a model takes, and the sizes at which its encoders see them.

    Attributes:
        most: largest number per sample; None for any, 0 for text-to-image models.
        least: smallest number per sample, in training and in prediction.
        vae_image_size: area in pixels to which each is resized for the autoencoder in its own proportions, and with it
            a target of its proportions; None for its own size, floored to 16.
        condition_image_size: the same for the text encoder; None if it sees no images.
        most_area: largest area that the autoencoder sees; larger images are shrunk to it, their sides rounded down.
        crops: floor its own size by cropping the edges, instead of resizing.
        whole_area: each is kept whole up to this area: its sides are rounded up by reflection; see `of_count`.
        fits_target: instead of its own size, each has the scale of the target and fits into it.
        alpha: the model sees and makes the alpha channel of images; else transparent parts are white.
    """

    most: int | None = None
    least: int = 0
    vae_image_size: int | None = None
    condition_image_size: int | None = None
    most_area: int | None = None
    crops: bool = False
    whole_area: int | None = None
    fits_target: bool = False
    alpha: bool = False

    @property
    def text_sees_them(self) -> bool:
        """Whether the text encoder sees the condition images, so that samples cannot share a prompt's conditioning."""
        return self.condition_image_size is not None

    @property
    def limit(self) -> str:
        return f"{self.most} condition image{'' if self.most == 1 else 's'}"

    @property
    def sets_target(self) -> bool:
        """Whether the result of the pipeline has the grid of the condition image.

        Positions are centred or counted from the corner: on different grids, a target and its control of the same view
        would teach a zoom.
        """
        return self.vae_image_size is not None

    def of_count(self, count: int) -> Self:
        """Return the rules for this many condition images and their target: only a single one is kept whole."""
        return self if count == 1 else replace(self, whole_area=None)

    def size(self, width: int, height: int, max_area: int | None = None) -> Sides:
        """Return the (width, height) that the autoencoder sees, of at most about `max_area` pixels."""
        if self.vae_image_size is not None:
            return self._of_area(width, height, min(self.vae_image_size, max_area or self.vae_image_size))
        return floor_size(*self.shrunk(width, height, max_area))

    def _of_area(self, width: int, height: int, area: int) -> Sides:
        """Return sides of about `area` pixels in the same proportions, rounded as in the pipeline; LongCat's differ."""
        return size_of_area(width, height, area)

    def shrunk(self, width: int, height: int, max_area: int | None = None) -> Sides:
        """Return sides shrunk to the least of both areas, in whole pixels as the pipeline rounds them."""
        areas = [area for area in (max_area, self.most_area) if area is not None]
        return shrunk(width, height, min(areas), round if self.most_area is None else int) if areas else (width, height)

    def window(self, width: int, height: int, max_area: int | None = None, flipped: bool = False) -> Window:
        """Return the part of an image that the autoencoder sees; arguments as of `size`."""
        if self.whole_area is None:
            size = self.size(width, height, max_area)
            return Window.center(self.shrunk(width, height, max_area) if self.crops else size, size, flipped)
        own = (width, height) if max_area is None else shrunk(width, height, max_area)
        side = math.sqrt(self.whole_area)
        scale = min(1.0, side / math.sqrt(math.prod(own)), 2 * side / max(own))
        while True:  # as FLUX.3's pipeline
            frame = max(1, round(own[0] * scale)), max(1, round(own[1] * scale))
            width, height = (max(64, -(-whole // SIDE_MULTIPLE) * SIDE_MULTIPLE) for whole in frame)
            if width * height <= self.whole_area:
                break
            scale *= 0.995
        left, top = (width - frame[0]) // 2, (height - frame[1]) // 2
        return Window(frame, (-left, -top, width - left, height - top), (width, height), flipped)

    def fitted(self, own: Sides, target: Sides, flipped: bool = False) -> Window:
        """Return the part of an image that fits into a target, or covers it if their proportions are close."""
        shares = [side / whole for side, whole in zip(target, own, strict=True)]
        covers = min(shares) >= (1 - FITS_EXACTLY) * max(shares)
        width, height = (max(SIDE_MULTIPLE, round(side * (max if covers else min)(shares))) for side in own)
        return Window.center((width, height), target if covers else floor_size(width, height), flipped)

    def narrowed(self, window: Window) -> Window:
        """Return the part of a window that the autoencoder sees."""
        if self.whole_area is not None:
            return window
        size = self.size(*window.size)
        if not self.crops:
            return window._replace(size=size)
        left, top, right, bottom = window.box
        across, down = (
            round(side * (1 - seen / whole) / 2)
            for side, seen, whole in zip(window.seen, size, self.shrunk(*window.size), strict=True)
        )
        return window._replace(box=(left + across, top + down, right - across, bottom - down), size=size)

    def load(self, paths: Sequence[ImageFile], windows: Sequence[Window]) -> tuple[list[Tensor], list[Tensor]]:
        """Return images for the autoencoder, each (1, C, h, w) in [-1, 1], and for the text encoder.

        The latter are (C, h, w) in 8 bits; none if it sees no images.

        Args:
            windows: the part of each, at the autoencoder's size.

        Raises:
            UserError: a file is unreadable.
        """
        used = [max(window.frame[0] * window.frame[1], self.condition_image_size or 0) for window in windows]
        opened = [_opened_for(*one, self.alpha) for one in zip(paths, windows, used, strict=True)]
        images, windows = [image for image, _ in opened], [window for _, window in opened]
        pixels = [to_tensor(window.of(image))[None] for window, image in zip(windows, images, strict=True)]
        return pixels, self._for_text(images, windows)

    def _for_text(self, images: Iterable[Image.Image], windows: Iterable[Window]) -> list[Tensor]:
        area = self.condition_image_size
        if area is None:
            return []
        # The size of a whole image follows from its own proportions, not from the autoencoder's rounded ones.
        return [
            to_bytes(window.of(image, size_of_area(*(window.seen if window.cropped else image.size), area)))
            for image, window in zip(images, windows, strict=True)
        ]


@dataclass(frozen=True)
class SeenByBoth(ConditionImages):
    """Condition images that are resized once: the text encoder sees the autoencoder's."""

    @property
    def text_sees_them(self) -> bool:
        return True

    def _for_text(self, images: Iterable[Image.Image], windows: Iterable[Window]) -> list[Tensor]:
        return [to_bytes(self._seen(window.of(image))) for image, window in zip(images, windows, strict=True)]

    def _seen(self, image: Image.Image) -> Image.Image:
        """Return the autoencoder's image as the text encoder sees it."""
        return image
