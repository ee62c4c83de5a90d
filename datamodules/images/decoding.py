"""Image files to tensors as the diffusers pipelines see them: upright, 8-bit sRGB, in [-1, 1]."""

import math
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from datamodules.images.colours import HDR, ROUNDING, UNREADABLE, UNSPECIFIED, conversion
from datamodules.images.recipe_images import RecipeImage
from datamodules.images.samples import SIDE_MULTIPLE, Alpha, ImageFile
from foundation.errors import UserError, printable
from foundation.files import reason, require_file
from foundation.notes import note_once

# Increase it when the same file gives other pixels: caches are then rebuilt.
PREPROCESSING = 4
# Largest image to train on at its own size: 65,536 tokens, and attention is quadratic in them.
MOST_PIXELS = 2**24
# Held while a large image is decoded, which takes gigabytes.
_ONE_LARGE = Lock()
# An image may be reduced by a whole factor to this multiple of the wanted sides before it is resized.
REDUCING_GAP = 3
# Formats that are read, whatever a file's name: PIL gives others, such as EPS, to programs like Ghostscript.
RASTERS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# Formats that may hold several images. Further images in a phone's JPEG (MPO) are not meant to be seen.
MOVING = ("GIF", "PNG", "WEBP", "TIFF")
# A marker in a JPEG that ends the pixels of a scan: no stuffed byte, restart or fill byte.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# Bytes that a JPEG without damage does not read as pixels, with the markers between which others restart.
FILLER = b"".join(bytes(range(1, 255)) * 16 + bytes((0xFF, 0xD0 + number)) for number in range(8)) * 2
# Largest brightness of a mask that has its levels in the wrong range, as 0 and 1 or 12 bits in 16, and weights nothing.
BLACK = 32
# PIL warns of damaged EXIF and the like, which does not affect the pixels, and of half of the pixels that it reads.
warnings.filterwarnings("ignore", module="PIL")

Sides = tuple[int, int]


class Facts(NamedTuple):
    """The facts in an image's header.

    Attributes:
        width, height: sides of the upright image.
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
        return self.width, self.height


@contextmanager
def opened(path: ImageFile) -> Iterator[Image.Image]:
    """Temporarily open an image file, without decoding it.

    Raises:
        UserError: the file is not an image, is damaged or ends early, is HDR, has more pixels than PIL reads (179
            million), or floating-point pixels, whose range is unknown.
    """
    try:
        while isinstance(path, RecipeImage):
            path = path.image
        if isinstance(path, Path):
            require_file(path)
        # PIL maps an uncompressed TIFF that is opened by its path, at the turned size: its pixels would be scrambled.
        with path.open("rb") if isinstance(path, Path) else BytesIO(path.read_bytes()) as file:
            image = Image.open(file, formats=RASTERS)
            tags = getattr(image, "tag_v2", {})  # of a TIFF: bits and photometric interpretation
            odd = image.mode.startswith("I") and tags and (tags.get(258), tags.get(262)) != ((16,), 1)
            if image.mode == "F" or odd:
                raise ValueError("its pixels are neither of 8 nor of 16 bits, or inverted: save it with 8 or 16 bits")
            _complete(image)
            if image.info["cicp"][1] in HDR:
                raise ValueError(f"it is HDR ({HDR[image.info['cicp'][1]]}), save it as sRGB")
            yield image
    except Image.DecompressionBombError as error:
        raise UserError(f"cannot read the image {path}: it has more than 179 megapixels, shrink it") from error
    except UnidentifiedImageError as error:
        raise UserError(f"cannot read the image {path}: it is empty or no image") from error
    except UNREADABLE as error:
        raise UserError(f"cannot read the image {path}: {reason(error).rstrip('.')}") from error


def one_large(size: Sides) -> AbstractContextManager[object]:
    """Temporarily let no other thread decode a large image."""
    return _ONE_LARGE if math.prod(size) > MOST_PIXELS else nullcontext()


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
        UserError: the file is not an image, or a side is shorter than 16 pixels.
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
        UserError: the file is not an image.
    """
    with opened(path) as image:
        size = _upright_size(image)
        frames = image.format in MOVING and getattr(image, "n_frames", 1) > 1
        transform, fault = conversion(image)
        if fault:
            note_once(
                f"{printable(str(path))}: its colour profile cannot be used ({fault}). Its colours are read as sRGB"
            )
        return Facts(*size, frames, image.has_transparency_data, "" if transform is None else "srgb")


def _upright_size(image: Image.Image) -> Sides:
    # PIL's getexif of a PNG would decode all pixels, to find chunks after them.
    exif = image.getexif() if image.info.get("late") else Image.Image.getexif(image)
    turned = ExifTags.Base.Orientation in getattr(image, "tag_v2", ())  # a TIFF, by PIL
    return image.size[::-1] if not turned and exif.get(ExifTags.Base.Orientation, 1) in range(5, 9) else image.size


def _complete(image: Image.Image) -> None:
    """Add to an opened image's info the parts of its header that PIL does not read.

    `cicp`: the code points of its colours, UNSPECIFIED if it has none. Of a PNG `late`: whether chunks that may hold
    EXIF follow the first one of pixels, and `transparency` in the range of PIL's pixels.
    """
    info, file = image.info, image.fp  # type: ignore[attr-defined]
    hdr = re.search(rb"cicp\0{4}.([\x10\x12])", info.get("icc_profile") or b"", re.S)
    cicp, pixels, depth, place = bytes((UNSPECIFIED, hdr[1][0], 0, 1)) if hdr else b"", False, 8, file.tell()
    if image.format == "PNG":
        for kind, _ in _chunks(file):
            pixels = pixels or kind == b"IDAT"
            if kind == b"IHDR":
                depth = file.read(13)[8]
            elif kind == b"cICP":
                cicp = file.read(4)
            elif pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                info["late"] = True
        hidden = info.get("transparency")
        if isinstance(hidden, tuple) and depth == 16:
            info["transparency"] = tuple(level >> 8 for level in hidden)
        elif isinstance(hidden, int) and image.mode == "L" and depth < 8:
            info["transparency"] = hidden * 255 // (2**depth - 1)
    elif image.format == "AVIF":  # its decoder applies the matrix and the range
        file.seek(0)
        if found := re.search(rb"colrnclx\0(.)\0(.)", file.read(2**16), re.S):
            cicp = b"".join(found.groups()) + b"\0\1"
    file.seek(place)
    info["cicp"] = tuple(cicp) if len(cicp) == 4 else (UNSPECIFIED, UNSPECIFIED, 0, 1)


def _chunks(png: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield the kind and the length of each chunk of a PNG, whose bytes come next in the file."""
    place = 8
    while png.seek(place) and len(head := png.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        yield kind, length
        place += 12 + length


def verify_image(path: ImageFile) -> None:
    """Find damage without decoding all pixels: in a JPEG at an eighth of its size, in a PNG by its checksums.

    Raises:
        UserError: the file is unreadable or ends early, or rows of pixels are missing.
    """
    with opened(path) as image:
        if image.format == "PNG":
            missing = _missing_bytes(image.fp)  # type: ignore[attr-defined]
            image.verify()
            if missing > 0:
                raise EOFError("rows of its pixels are missing")
            return
        with one_large(image.size):
            small = _at_an_eighth(image)
            if image.format in ("JPEG", "MPO"):
                content = path.read_bytes()
                end = _end_of_pixels(content)
                # A decoder silently fills missing parts with grey; only then does it read the filler.
                with Image.open(BytesIO(content[:end] + FILLER + content[end:]), formats=("JPEG",)) as filled:
                    if small.tobytes() != _at_an_eighth(filled).tobytes():
                        raise EOFError("a part of its pixels is missing")


def _at_an_eighth(image: Image.Image) -> Image.Image:
    """Decode an opened image, a JPEG at an eighth of its size, or at half if its pixels come in several scans."""
    part = 2 if "progressive" in image.info else 8
    image.draft(None, (image.width // part, image.height // part))
    image.load()
    return image


def _end_of_pixels(jpeg: bytes) -> int:
    """Return the position after the last scan of the first image in a JPEG, at the marker of its end."""
    place = 2
    while place + 4 <= len(jpeg) and (kind := jpeg[place + 1]) != 0xD9:
        if kind == 0xFF:  # bytes may fill the space before a marker
            place += 1
            continue
        place += 2 + int.from_bytes(jpeg[place + 2 : place + 4])
        if kind == 0xDA:  # a scan
            found = _MARKER.search(jpeg, place)
            place = found.start() if found else len(jpeg)
    return place


def _missing_bytes(png: BinaryIO) -> int:
    """Return the number of bytes that the pixels of a PNG lack once they are decompressed; up to 0 if none."""
    unpacked, wanted = zlib.decompressobj(), 0
    for kind, length in _chunks(png):
        if kind == b"IHDR":
            width, height, depth, colours, _, _, interlaced = struct.unpack(">IIBBBBB", png.read(13))
            bits = depth * {2: 3, 4: 2, 6: 4}.get(colours, 1)
            # Interlaced rows are divided, each part with a byte of its own: at least as many as the pixels have.
            wanted = width * height * bits // 8 if interlaced else height * (1 + (width * bits + 7) // 8)
        elif kind == b"IDAT":
            packed = png.read(length)
            while wanted > 0 and (some := unpacked.decompress(packed, 2**20)):
                wanted, packed = wanted - len(some), unpacked.unconsumed_tail
    return wanted


# Pixels.


def open_image(path: ImageFile, area: int | None = None, in_srgb: bool = True, alpha: bool = False) -> Image.Image:
    """Decode an image to upright 8-bit sRGB; 16 bits are scaled down, and transparency is blended onto white.

    Args:
        area: pixels that will be used: a much larger image is reduced, a JPEG during decoding.
        in_srgb: convert colours, which the values of a mask are not.
        alpha: return RGBA instead, opaque if the image has no transparency.

    Raises:
        UserError: the file is unreadable or ends early.
    """
    if isinstance(path, RecipeImage):  # outside of training
        size = image_facts(path).size
        size = shrunk(*size, path.side**2) if path.side else size
        return path.made_from_whole(open_image(path.image, size[0] * size[1], alpha=alpha), size)
    with opened(path) as image:
        size, width, drafted = _upright_size(image), image.width, 1
        times = 1 if area is None else int((width * image.height / area) ** 0.5 / REDUCING_GAP)
        if times > 1:
            image.draft(None, (width // times, image.height // times))
            times //= (drafted := round(width / image.width))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.size != tuple(-(-side // drafted) for side in size):
            raise ValueError(f"its header gives {size[0]}x{size[1]} pixels, its content {image.width}x{image.height}")
        transform, opacity = conversion(image)[0] if in_srgb else None, _opacity(image)
        if image.mode.startswith("I"):  # 16 bits a pixel, whatever the byte order
            deep = np.asarray(image).clip(0, 2**16 - 1).astype(np.uint16)
            keeps_depth = transform is not None and transform.input_mode == "I;16"
            image = Image.fromarray(deep if keeps_depth else (deep >> 8).astype(np.uint8))
        if transform is not None:
            image = transform.apply(
                image if image.mode == transform.input_mode else image.convert(transform.input_mode)
            )
        elif image.mode in ("1", "P", "PA"):
            image = image.convert("RGB")
        if opacity is not None:
            image = image.convert("RGB")
            image.putalpha(opacity)
        if times > 1:
            image = image.reduce(times)
        if alpha:
            return image.convert("RGBA")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return image.convert("RGB")


def _opacity(image: Image.Image) -> Image.Image | None:
    """Return the alpha channel of a decoded image; None if nothing is transparent."""
    if not image.has_transparency_data:
        return None
    if image.mode.startswith("I"):
        return Image.fromarray(np.where(np.asarray(image) == image.info["transparency"], 0, 255).astype(np.uint8))
    return image.convert("RGBA").getchannel("A")


def open_mask(path: ImageFile) -> Image.Image:
    """Decode a mask to its brightness, or to its alpha channel if the visible part has one colour.

    Raises:
        UserError: the file is unreadable, or has both colours and transparent parts.
    """
    if isinstance(path, RecipeImage):
        return path.mask(image_facts(path).size)
    image = open_image(path, in_srgb=False, alpha=True)
    colours, opacity = np.asarray(image)[..., :3], image.getchannel("A")
    if isinstance(path, Alpha):
        return opacity
    if opacity.getextrema()[0] == 255:
        return image.convert("L")
    visible = colours[np.asarray(opacity) > 0]
    if visible.size and np.ptp(visible, axis=0).max() > ROUNDING:
        raise UserError(f"the mask {path} has colours and transparent parts: save it without an alpha channel")
    return opacity


def verify_mask(path: ImageFile) -> bool:
    """Return whether a mask is white all over, so that it changes nothing.

    Raises:
        UserError: it is unreadable, or black all over.
    """
    if isinstance(path, RecipeImage):
        return False
    levels = np.asarray(open_mask(path))
    least, most = int(levels.min()), int(levels.max())
    if most < BLACK:
        raise UserError(f"the mask {path} is nearly black (at most {most} of 255): only white parts are trained")
    return least == 255


def to_tensor(image: Image.Image) -> Tensor:
    """Convert 8-bit RGB or RGBA to (C, H, W) in [-1, 1]."""
    return to_bytes(image).float().div_(255).mul_(2).sub_(1)


def to_bytes(image: Image.Image) -> Tensor:
    """Convert 8-bit RGB or RGBA to (C, H, W) in 8 bits."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
