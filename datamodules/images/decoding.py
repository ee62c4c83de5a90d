"""Image files to tensors as the diffusers pipelines see them: upright, 8-bit sRGB, in [-1, 1]."""

import logging
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

from datamodules.errors import UserError, printable
from datamodules.files import DAMAGED, reason, require_file
from datamodules.images.samples import SIDE_MULTIPLE, Alpha, ImageFile

log = logging.getLogger("retouch")

# Increase it when the same file gives other pixels: caches are then rebuilt.
PREPROCESSING = 2
# Largest image to train on at its own size: 65,536 tokens, and attention is quadratic in them.
MOST_PIXELS = 2**24
# Threads that check files decode large ones one at a time: each takes gigabytes.
ONE_LARGE = Lock()
# An image may be reduced by a whole factor to this multiple of the wanted sides before it is resized.
REDUCING_GAP = 3
# Formats that are read, whatever a file's name: PIL gives others, such as EPS, to programs like Ghostscript.
RASTERS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# Formats that may hold several images. Further images in a phone's JPEG (MPO) are not meant to be seen.
MOVING = ("GIF", "PNG", "WEBP", "TIFF")
# Errors of PIL for files that are no images, end early or are damaged, and of LittleCMS for profiles.
UNREADABLE = (*DAMAGED, OSError, ImageCms.PyCMSError)
# PIL warns of damaged EXIF and the like, which does not affect the pixels, and of half of the pixels that it reads.
warnings.filterwarnings("ignore", module="PIL")

# Tags of EXIF: the orientation; its two folders, and in these ColorSpace and InteroperabilityIndex.
ORIENTATION = 0x0112
EXIF, INTEROPERABILITY, COLOR_SPACE, INDEX = 0x8769, 0xA005, 0xA001, 1
# Levels of 255 by which profiles of sRGB differ from each other: their tables are rounded.
ROUNDING = 2
ADOBE_RGB = Path(__file__).with_name("adobe_rgb.icc").read_bytes()
SRGB, LAB = (ImageCms.ImageCmsProfile(ImageCms.createProfile(name)) for name in ("sRGB", "LAB"))

Sides = tuple[int, int]


class Facts(NamedTuple):
    """The facts in an image's header.

    Attributes:
        width, height: of the upright image.
        frames: it has more frames than the first, which is used.
        alpha: it may be transparent.
        colours: `srgb` if its colours are converted, else empty; part of the identity of an image in a cache.
    """

    width: int
    height: int
    frames: bool
    alpha: bool
    colours: str

    @property
    def size(self) -> Sides:
        """(width, height) of the upright image."""
        return self.width, self.height


@contextmanager
def opened(path: ImageFile) -> Iterator[Image.Image]:
    """Temporarily open an image file, without decoding it.

    Raises:
        UserError: the file is no image, is damaged or ends early, has more pixels than PIL reads (179 million), or its
            pixels are floating-point numbers, whose range is unknown.
    """
    try:
        if isinstance(path, Path):
            require_file(path)
        with Image.open(path if isinstance(path, Path) else path.open(), formats=RASTERS) as image:
            if image.mode == "F":
                raise ValueError("its pixels are floating-point numbers, save it with 8 or 16 bits")
            yield image
    except Image.DecompressionBombError as error:
        raise UserError(f"cannot read the image {path}: it has more than 179 megapixels, shrink it") from error
    except UnidentifiedImageError as error:
        raise UserError(f"cannot read the image {path}: it is empty or no image") from error
    except UNREADABLE as error:
        raise UserError(f"cannot read the image {path}: {reason(error).rstrip('.')}") from error


# Sizes.


def floor_size(width: int, height: int, multiple: int = SIDE_MULTIPLE) -> Sides:
    """Return both sides rounded down to a multiple."""
    return width // multiple * multiple, height // multiple * multiple


def shrunk(width: int, height: int, max_area: int, whole: Callable[[float], int] = round) -> Sides:
    """Return whole sides scaled down to at most `max_area` pixels, each at least 16."""
    scale = min(1.0, math.sqrt(max_area / (width * height)))
    longest = max_area // SIDE_MULTIPLE
    width, height = (min(longest, max(SIDE_MULTIPLE, whole(side * scale))) for side in (width, height))
    return width, height


def size_of_area(width: int, height: int, area: int) -> Sides:
    """Return sides of about `area` pixels in the same proportions, rounded to 32 as in the Qwen pipelines."""
    target_width = math.sqrt(area * (width / height))
    target_height = target_width / (width / height)
    return max(32, round(target_width / 32) * 32), max(32, round(target_height / 32) * 32)


def image_size(path: ImageFile) -> Sides:
    """Return (width, height) of the upright image, from its header.

    Raises:
        UserError: the file is no image, or a side is shorter than 16 pixels.
    """
    size = image_facts(path).size
    require_sides(path, *size)
    return size


def require_sides(path: ImageFile, width: int, height: int) -> None:
    """Raise a UserError if a side is shorter than 16 pixels."""
    if min(width, height) < SIDE_MULTIPLE:
        raise UserError(f"the image {path} is {width}x{height}: both sides must be at least {SIDE_MULTIPLE} pixels")


def refuse_large(path: ImageFile, width: int, height: int) -> None:
    """Raise a UserError for an image whose training step would need hundreds of gigabytes."""
    if width * height > MOST_PIXELS:
        raise UserError(
            f"the image {path} is {width}x{height}, {width * height / 1e6:.1f} megapixels: training at its own size "
            f"takes at most {MOST_PIXELS / 1e6:.1f}; set data.resolution, or shrink it"
        )


# Headers and damage.


def image_facts(path: ImageFile) -> Facts:
    """Return the facts of an image without decoding it; log a note about an unusable profile.

    Raises:
        UserError: the file is no image.
    """
    with opened(path) as image:
        width, height = image.size
        # PIL's getexif of a PNG would decode all pixels, to find chunks after them.
        late = image.format == "PNG" and _has_text_after_pixels(path)
        exif = image.getexif() if late else Image.Image.getexif(image)
        if exif.get(ORIENTATION, 1) in range(5, 9):
            width, height = height, width
        frames = image.format in MOVING and getattr(image, "n_frames", 1) > 1
        transform, fault = conversion(image)
        if fault:
            _note_fault(str(path), fault)
        return Facts(width, height, frames, image.has_transparency_data, "" if transform is None else "srgb")


@lru_cache(maxsize=4096)
def _note_fault(path: str, fault: str) -> None:
    log.warning(f"note: {printable(path)}: its colour profile cannot be used ({fault}). Its colours are read as sRGB")


def _has_text_after_pixels(png: ImageFile) -> bool:
    """Return whether chunks that may hold EXIF follow the first one of pixels."""
    pixels = False
    with png.open("rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            pixels = pixels or kind == b"IDAT"
            if pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            file.seek(length + 4, 1)
    return False


def verify_image(path: ImageFile) -> None:
    """Find damage without decoding all pixels: in a JPEG at an eighth of its size, in a PNG by its checksums.

    Raises:
        UserError: the file is unreadable or ends early.
    """
    with opened(path) as image:
        if image.format == "PNG":
            image.verify()
            return
        image.draft("L", (image.width // 8, image.height // 8))
        with ONE_LARGE if image.width * image.height > MOST_PIXELS else nullcontext():
            image.load()


# Pixels.


def open_image(path: ImageFile, area: int | None = None, in_srgb: bool = True, alpha: bool = False) -> Image.Image:
    """Decode an image to upright 8-bit sRGB; 16 bits are scaled down, and transparency is blended onto white.

    Args:
        area: pixels that will be used: a much larger image is reduced, a JPEG during decoding.
        in_srgb: convert colours; the values of a mask are no colours.
        alpha: return RGBA instead, opaque if the image has no transparency.

    Raises:
        UserError: the file is unreadable or ends early.
    """
    with opened(path) as image:
        times = 1 if area is None else int((image.width * image.height / area) ** 0.5 / REDUCING_GAP)
        if times > 1:
            width = image.width
            image.draft(None, (width // times, image.height // times))
            times //= round(width / image.width)
        ImageOps.exif_transpose(image, in_place=True)
        image.load()
        if isinstance(path, Alpha):
            opaque = Image.new("L", image.size, 255)
            return (image.convert("RGBA").getchannel("A") if image.has_transparency_data else opaque).convert("RGB")
        transform = conversion(image)[0] if in_srgb else None
        if image.mode.startswith("I"):  # 16 bits a pixel, whatever the byte order
            deep = np.asarray(image).clip(0, 2**16 - 1).astype(np.uint16)
            keeps_depth = transform is not None and transform.input_mode == "I;16"
            image = Image.fromarray(deep if keeps_depth else (deep >> 8).astype(np.uint8))
        if image.mode in ("1", "P", "PA"):
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        if transform is not None:
            image = _converted(image, transform)
        if times > 1:
            image = image.reduce(times)
        if alpha:
            return image.convert("RGBA")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")


def to_tensor(image: Image.Image) -> Tensor:
    """Convert 8-bit RGB or RGBA to (C, H, W) in [-1, 1]."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.float().div_(255).mul_(2).sub_(1)


# Colours.


def conversion(image: Image.Image) -> tuple[ImageCms.ImageCmsTransform | None, str]:
    """Return the transform to sRGB of an opened image, None if it is sRGB, and the fault of its profile if any.

    An embedded profile comes first, then EXIF's mark of Adobe RGB.
    """
    modes = {"1": "L", "L": "L", "LA": "L", "La": "L", "CMYK": "CMYK", "LAB": "LAB"}
    mode, fault = "I;16" if image.mode[:1] == "I" else modes.get(image.mode, "RGB"), ""
    try:
        if (profile := _profile(image)) is not None:
            return _to_srgb(profile, mode), ""
    except UNREADABLE as error:
        fault = str(error) or type(error).__name__
    return _to_srgb(LAB.tobytes(), mode) if mode == "LAB" else None, fault


def _converted(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    """Return the image in sRGB, with its alpha channel unchanged."""
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    converted = transform.apply(image if image.mode == transform.input_mode else image.convert(transform.input_mode))
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


def _profile(image: Image.Image) -> bytes | None:
    if "icc_profile" in image.info:
        return image.info["icc_profile"] or b""  # Pillow sets None for one that it cannot unpack
    return ADOBE_RGB if _is_adobe_rgb(image) else None


def _is_adobe_rgb(image: Image.Image) -> bool:
    """Return whether EXIF marks Adobe RGB: by a value of its own, or as "uncalibrated" with option file R03 (DCF)."""
    exif = Image.Image.getexif(image)  # a PNG's own would decode all pixels
    try:
        space = exif.get_ifd(EXIF).get(COLOR_SPACE)
        return space == 2 or (space == 0xFFFF and str(exif.get_ifd(INTEROPERABILITY).get(INDEX)).startswith("R03"))
    except UNREADABLE:
        return False


@lru_cache(maxsize=64)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform of a mode's pixels; None if the profile is sRGB."""
    source = ImageCms.ImageCmsProfile(BytesIO(profile))
    kind = source.profile.xcolor_space.strip()
    mode = "RGB" if kind == "RGB" and mode in ("L", "I;16") else mode  # LittleCMS refuses other differences
    # The optimized table is too coarse for the shadows of 16 bits.
    flags = ImageCms.Flags.NOOPTIMIZE if mode == "I;16" else ImageCms.Flags.NONE
    transform = ImageCms.buildTransform(source, SRGB, mode, "RGB", flags=flags)
    if kind == "RGB":
        levels = np.arange(0, 256, 17, dtype=np.uint8)
        colours = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(64, 64, 3)
        changed = np.asarray(transform.apply(Image.fromarray(colours))).astype(int) - colours
        return transform if np.abs(changed).max() > ROUNDING else None
    return transform
