"""Colours of image files: the transform to sRGB that their code points, profile, chunks or EXIF ask for."""

import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from foundation.files import DAMAGED

# Errors of PIL for files that are not images, end early or are damaged, and of LittleCMS for profiles.
UNREADABLE = (*DAMAGED, OSError, ImageCms.PyCMSError)
# Tags of EXIF: its two folders, and in these ColorSpace and InteroperabilityIndex.
EXIF, INTEROPERABILITY, COLOR_SPACE, INDEX = 0x8769, 0xA005, 0xA001, 1
# Levels of 255 by which profiles of sRGB differ from each other: their tables are rounded.
ROUNDING = 2
# Code points of ITU-T H.273: x and y of red, green and blue, then white; exponents of curves, None for sRGB's.
UNSPECIFIED = 2
D65 = (0.3127, 0.3290)
BT_709 = (0.64, 0.33, 0.30, 0.60, 0.15, 0.06, *D65)
PRIMARIES = {
    1: BT_709,
    UNSPECIFIED: BT_709,
    5: (0.64, 0.33, 0.29, 0.60, 0.15, 0.06, *D65),
    6: (0.63, 0.34, 0.31, 0.595, 0.155, 0.07, *D65),
    9: (0.708, 0.292, 0.17, 0.797, 0.131, 0.046, *D65),
    12: (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, *D65),
}
CURVES = {**dict.fromkeys((1, UNSPECIFIED, 6, 13, 14, 15)), 4: 2.2, 5: 2.8, 8: 1.0}
HDR = {16: "PQ", 18: "HLG"}
ADOBE_RGB = Path(__file__).with_name("adobe_rgb.icc").read_bytes()
SRGB, LAB = (ImageCms.ImageCmsProfile(ImageCms.createProfile(name)) for name in ("sRGB", "LAB"))


def conversion(image: Image.Image) -> tuple[ImageCms.ImageCmsTransform | None, str]:
    """Return the transform to sRGB of an opened image, None if it is sRGB, and the fault of its profile if any.

    Code points come first, then an embedded profile, a PNG's chunks, and EXIF's mark of Adobe RGB.
    """
    modes = {"1": "L", "L": "L", "LA": "L", "La": "L", "CMYK": "CMYK", "LAB": "LAB"}
    mode, fault = "I;16" if image.mode[:1] == "I" else modes.get(image.mode, "RGB"), ""
    try:
        if (profile := _profile(image)) is not None:
            return _to_srgb(profile, mode), ""
    except UNREADABLE as error:
        fault = str(error) or type(error).__name__
    return _to_srgb(LAB.tobytes(), mode) if mode == "LAB" else None, fault


def _profile(image: Image.Image) -> bytes | None:
    """Return the profile that an image has or whose colours it names; None for none."""
    info = image.info
    primaries, transfer, *rest = info["cicp"]
    if (primaries, transfer) != (UNSPECIFIED, UNSPECIFIED):
        if primaries not in PRIMARIES or transfer not in CURVES or rest != [0, 1]:
            raise ValueError(f"the code points of its colours are {info['cicp']}")
        return _profile_of(PRIMARIES[primaries], CURVES[transfer])
    if "icc_profile" in info:
        return info["icc_profile"] or b""  # Pillow sets None for one that it cannot unpack
    if image.format == "PNG" and "srgb" not in info and not info.keys().isdisjoint(("gamma", "chromaticity")):
        white, colours = (one := info.get("chromaticity", (*D65, *BT_709[:6])))[:2], one[2:]
        gamma = info.get("gamma", 1 / 2.2) or math.inf
        return _profile_of((*colours, *white), None if abs(gamma * 2.2 - 1) < 0.01 else 1 / gamma)
    return ADOBE_RGB if _is_adobe_rgb(image) else None


def _profile_of(primaries: Sequence[float], exponent: float | None) -> bytes:
    """Return an ICC profile (version 4) of x and y of red, green, blue and white, and of a curve; None for sRGB's."""
    across, down = np.reshape(primaries, (4, 2)).T
    if min(down) <= 0 or exponent == 0:
        raise ValueError("a colour or an exponent is zero")
    points = np.stack([across, down, 1 - across - down]) / down
    bradford = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
    d50 = np.array([0.9642, 1.0, 0.8249])
    adapted = np.linalg.inv(bradford) @ np.diag((bradford @ d50) / (bradford @ points[:, 3])) @ bradford
    columns = adapted @ points[:, :3] * np.linalg.solve(points[:, :3], points[:, 3])

    def numbers(values: Iterable[float]) -> bytes:
        return b"".join(struct.pack(">i", round(float(value) * 2**16)) for value in values)

    srgb = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    curve = b"para" + struct.pack(">IHH", 0, *((3, 0) if exponent is None else (0, 0)))
    curve += numbers(srgb if exponent is None else [exponent])
    tags = {b"wtpt": b"XYZ \0\0\0\0" + numbers(d50)}
    for name, column in zip((b"r", b"g", b"b"), columns.T, strict=True):
        tags |= {name + b"XYZ": b"XYZ \0\0\0\0" + numbers(column), name + b"TRC": curve}
    table, data = struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(data), len(content))
        data += content
    size = struct.pack(">I", 128 + len(table) + len(data))
    head = size + b"\0\0\0\0\4\x30\0\0mntrRGB XYZ " + bytes(12) + b"acsp" + bytes(28) + numbers(d50)
    return head.ljust(128, b"\0") + table + data


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
