"""The condition images of a sample, prepared as the model takes them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import lightning.pytorch as L
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datamodules.base import Asking
from datamodules.images.sample import Picture
from datamodules.images.transforms import floor_size, open_image, shrunk, size_of_area, to_tensor
from datamodules.images.window import Window

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


class Model(Protocol):
    """What the data needs to know of the model."""

    @property
    def base(self) -> "Named":
        """The frozen pipeline."""

    @property
    def encoder(self) -> "Fingerprinted":
        """What makes latents of pictures and prompts."""

    @property
    def objective(self) -> Asking | None:
        """What it is trained for; None where it is not."""

    @property
    def condition_images(self) -> ConditionImages:
        """How many it takes, and at what sizes."""

    @property
    def geometry(self) -> "Sides":
        """Of which numbers the sides of its pictures are multiples."""


class Named(Protocol):
    """A pipeline that messages name."""

    name: str


class Sides(Protocol):
    """What a model's pipeline makes pictures of.

    Attributes:
        side_multiple: of which both sides are multiples.
        preferred_sizes: the (width, height) that it resizes a picture to; empty if it takes any.
        resolution: side of a square picture.
        text: the prompt tensor (L, ...) that has as many rows as there are text tokens.
    """

    @property
    def text(self) -> str: ...

    @property
    def side_multiple(self) -> int: ...

    @property
    def preferred_sizes(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def resolution(self) -> int: ...


class Fingerprinted(Protocol):
    """Encoders that know what their outputs depend on."""

    def fingerprint_parts(self, memo: Path) -> Mapping[str, Any]:
        """All of it, beside their inputs.

        Args:
            memo: a file that remembers the checksums of a local model's files.
        """


def model_of(trainer: L.Trainer) -> Model:
    """The trainer's model."""
    return cast(Model, trainer.lightning_module)
