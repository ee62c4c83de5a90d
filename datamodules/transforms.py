"""An image file to a tensor, as the diffusers pipelines see it: RGB, upright, sides floored to 16, in [-1, 1]."""

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from datamodules.errors import UserError

# Counts up when the same file would give other pixels: what is cached from them is then encoded again.
PREPROCESSING = 1
SIDE_MULTIPLE = 16
ORIENTATION = 0x0112
# What PIL raises for files that are no image or end too early.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def floor_size(width: int, height: int, multiple: int = SIDE_MULTIPLE) -> tuple[int, int]:
    """Both sides rounded down to a multiple."""
    return width // multiple * multiple, height // multiple * multiple


def fit_area(width: int, height: int, max_area: int) -> tuple[int, int]:
    """The floored size, shrunk in proportion where its area is above `max_area` pixels."""
    scale = min(1.0, (max_area / (width * height)) ** 0.5)
    return floor_size(round(width * scale), round(height * scale))


def size_of_area(width: int, height: int, area: int) -> tuple[int, int]:
    """The size of so many pixels in the same proportions, both sides rounded to 32, as the Qwen pipelines do."""
    target_width = math.sqrt(area * (width / height))
    target_height = target_width / (width / height)
    return max(32, round(target_width / 32) * 32), max(32, round(target_height / 32) * 32)


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) of the upright image, from the header alone.

    Raises:
        UserError: the file is no image, or a side is shorter than 16 pixels.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            if image.getexif().get(ORIENTATION, 1) >= 5:
                width, height = height, width
    except UNREADABLE as error:
        raise UserError(f"cannot read the image {path}: {error}") from error
    if min(width, height) < SIDE_MULTIPLE:
        raise UserError(f"the image {path} is {width}x{height}: both sides must be at least {SIDE_MULTIPLE} pixels")
    return width, height


def verify_image(path: Path) -> None:
    """Find a damaged file without paying for all of its pixels: JPEG at an eighth of its size, PNG by checksums.

    Raises:
        UserError: the file is unreadable or ends too early.
    """
    try:
        with Image.open(path) as image:
            if image.format == "PNG":
                image.verify()
            else:
                image.draft("L", (image.width // 8, image.height // 8))
                image.load()
    except UNREADABLE as error:
        raise UserError(f"cannot read the image {path}: {error}") from error


def open_image(path: Path) -> Image.Image:
    """Decode to upright 8-bit RGB; 16-bit depth is scaled down, transparency laid on white.

    Raises:
        UserError: the file is unreadable or ends too early.
    """
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file)
            image.load()
    except UNREADABLE as error:
        raise UserError(f"cannot read the image {path}: {error}") from error
    if image.mode.startswith("I"):  # 16 bits a pixel, whatever the byte order
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def to_tensor(image: Image.Image) -> Tensor:
    """8-bit RGB to (3, H, W) in [-1, 1]."""
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 255
    return 2 * pixels.permute(2, 0, 1).contiguous() - 1


def resize(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image at (width, height)."""
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def load_image(path: Path) -> Tensor:
    """The file as (3, H, W) in [-1, 1], at its own size floored to 16."""
    image = open_image(path)
    return to_tensor(resize(image, floor_size(*image.size)))


def load_mask(path: Path, size: tuple[int, int]) -> Tensor:
    """The file's brightness as (1, H, W) in [0, 1] at `size` (width, height): white counts, black does not."""
    mask = open_image(path).convert("L").resize(size, Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(mask, dtype=np.float32))[None] / 255
