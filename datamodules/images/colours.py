"""The colours of an image file, converted to sRGB by LittleCMS as its header describes them."""

import struct
from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

from datamodules.files import DAMAGED

# What Pillow and LittleCMS raise for damaged profiles and EXIF.
UNUSABLE = (*DAMAGED, OSError, SyntaxError, ArithmeticError, struct.error, ImageCms.PyCMSError)
# Levels of 255 by which profiles of sRGB differ from each other: their tables are rounded.
ROUNDING = 2
SRGB, LAB = (ImageCms.ImageCmsProfile(ImageCms.createProfile(name)) for name in ("sRGB", "LAB"))
# (x, y) of red, green, blue and white: of sRGB, and of Adobe RGB (1998), section 4.3, with its gamma.
PRIMARIES = (0.64, 0.33), (0.3, 0.6), (0.15, 0.06), (0.3127, 0.329)
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06), (0.3127, 0.329)), 563 / 256
D50 = np.array([0.9642, 1.0, 0.8249])
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
# Tags of EXIF: its two folders, and in these ColorSpace and InteroperabilityIndex.
EXIF, INTEROPERABILITY, COLOR_SPACE, INDEX = 0x8769, 0xA005, 0xA001, 1


def conversion(image: Image.Image) -> tuple[ImageCms.ImageCmsTransform | None, str]:
    """Return the transform of an opened image's pixels, None where they are sRGB, and the fault of its profile if any.

    An embedded profile comes first, then the gAMA and cHRM chunks of a PNG, then EXIF's mark of Adobe RGB.
    """
    modes = {"1": "L", "L": "L", "LA": "L", "La": "L", "CMYK": "CMYK", "LAB": "LAB"}
    mode, fault = "I;16" if image.mode[:1] == "I" else modes.get(image.mode, "RGB"), ""
    try:
        if (profile := _profile(image)) is not None:
            return _to_srgb(profile, mode), ""
    except UNUSABLE as error:
        fault = str(error) or type(error).__name__
    return _to_srgb(LAB.tobytes(), mode) if mode == "LAB" else None, fault


def convert(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    """Return the image in sRGB, with its alpha channel as it is."""
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    converted = transform.apply(image if image.mode == transform.input_mode else image.convert(transform.input_mode))
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


def _profile(image: Image.Image) -> bytes | None:
    info = image.info
    if "icc_profile" in info:
        return info["icc_profile"] or b""  # Pillow's for one that cannot be unpacked
    if image.format == "PNG" and "srgb" not in info and not info.keys().isdisjoint(("gamma", "chromaticity")):
        flat, gamma = info.get("chromaticity"), 1 / info.get("gamma", 1 / 2.2)
        white, *colours = zip(flat[::2], flat[1::2], strict=True) if flat else (PRIMARIES[3], *PRIMARIES[:3])
        points = (*colours, white)
        # 2.2 is what programs write of sRGB's own curve (PNG, section 11.3.2.5).
        is_srgb = abs(gamma / 2.2 - 1) < 0.02 and np.allclose(points, PRIMARIES, atol=0.005)
        return None if is_srgb else matrix_profile(points, gamma)
    return matrix_profile(*ADOBE_RGB) if _is_adobe_rgb(image) else None


def _is_adobe_rgb(image: Image.Image) -> bool:
    """Whether EXIF says so, as cameras do: by a value of its own, or as "uncalibrated" of the option file R03 (DCF)."""
    exif = Image.Image.getexif(image)  # a PNG's own would decode all pixels
    try:
        space = exif.get_ifd(EXIF).get(COLOR_SPACE)
        return space == 2 or (space == 0xFFFF and str(exif.get_ifd(INTEROPERABILITY).get(INDEX)).startswith("R03"))
    except UNUSABLE:
        return False


@lru_cache(maxsize=64)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform of a mode's pixels; None where the profile is one of sRGB."""
    source = ImageCms.ImageCmsProfile(BytesIO(profile))
    kind = source.profile.xcolor_space.strip()
    mode = "RGB" if kind == "RGB" and mode in ("L", "I;16") else mode  # others that differ LittleCMS refuses
    # Its shortcut is a table too coarse for the shadows of 16 bits.
    flags = ImageCms.Flags.NOOPTIMIZE if mode == "I;16" else ImageCms.Flags.NONE
    transform = ImageCms.buildTransform(source, SRGB, mode, "RGB", flags=flags)
    if kind == "RGB":
        levels = np.arange(0, 256, 17, dtype=np.uint8)
        colours = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(64, 64, 3)
        changed = np.asarray(transform.apply(Image.fromarray(colours))).astype(int) - colours
        return transform if np.abs(changed).max() > ROUNDING else None
    return transform


def matrix_profile(points: tuple[tuple[float, float], ...], gamma: float) -> bytes:
    """Return an ICC profile of RGB colours.

    Args:
        points: the chromaticities (x, y) of red, green, blue and white.
        gamma: the exponent from values to light.
    """
    xyz = np.array([(x / y, 1, (1 - x - y) / y) for x, y in points]).T
    light = xyz[:, :3] * np.linalg.solve(xyz[:, :3], xyz[:, 3])
    adapted = np.linalg.solve(BRADFORD, (BRADFORD @ light) * ((BRADFORD @ D50) / (BRADFORD @ xyz[:, 3]))[:, None])
    curve = b"para" + bytes(8) + _fixed([gamma])
    tags = {b"wtpt": b"XYZ " + bytes(4) + _fixed(D50)}
    for name, column in zip((b"r", b"g", b"b"), adapted.T, strict=True):
        tags |= {name + b"XYZ": b"XYZ " + bytes(4) + _fixed(column), name + b"TRC": curve}
    start = 132 + 12 * len(tags)
    table = struct.pack(">I", len(tags))
    for name, data in tags.items():
        table += struct.pack(">4sII", name, start, len(data))
        start += len(data)
    head = struct.pack(">I4xI4s4s4s12x4s28x", start, 0x04200000, b"mntr", b"RGB ", b"XYZ ", b"acsp") + _fixed(D50)
    return head.ljust(128, b"\0") + table + b"".join(tags.values())


def _fixed(numbers: "np.ndarray | list[float]") -> bytes:
    """Return numbers of 32 bits, of which 16 are the fraction's."""
    return struct.pack(f">{len(numbers)}i", *(round(65536 * float(number)) for number in numbers))
