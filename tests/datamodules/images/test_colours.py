"""Colours of image files against LittleCMS itself, and what a cache makes of them."""

import io
import logging
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from datamodules.contents import Content
from datamodules.images.decoding import image_facts, open_image
from datamodules.images.samples import Sample
from datamodules.images.windows import Window, load_mask
from foundation.errors import UserError
from foundation.hashes import FileHashes, hash_file
from tests.support.pictures import photograph

SIZE = (48, 32)
SRGB = ImageCms.createProfile("sRGB")
# The columns of Apple's and Adobe's own profiles: red, green and blue in XYZ under D50.
P3 = ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407))
ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
# Parameters of the curve of sRGB.
SRGB_CURVE = (
    b"para"
    + bytes(4)
    + struct.pack(">HHiiiii", 3, 0, *(round(65536 * n) for n in (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)))
)


def gamma(exponent):
    return b"para" + bytes(8) + struct.pack(">i", round(65536 * exponent))


def xyz(*numbers):
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(65536 * number) for number in numbers))


def profile(space, kind=b"mntr", connection=b"XYZ ", **tags):
    """Build an ICC profile with these tags."""
    tags = {"wtpt": xyz(0.9642, 1, 0.8249), **tags}
    place = 132 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += struct.pack(">4sII", name.encode(), place + len(data), len(content))
        data += content
    head = struct.pack(">I4xI4s4s4s12x4s28x", place + len(data), 0x02400000, kind, space, connection, b"acsp")
    return (head + xyz(0.9642, 1, 0.8249)[8:]).ljust(128, b"\0") + table + data


def of_primaries(columns, curve):
    names = {f"{name}XYZ": xyz(*column) for name, column in zip("rgb", columns, strict=True)}
    return profile(b"RGB ", **names, **{f"{name}TRC": curve for name in "rgb"})


def of_ink():
    """Build a table of 2 x 2 x 2 x 2 Lab colours for inks, as in printer profiles: an 8-bit A2B0 tag."""
    ramp = bytes(range(256))
    inks = np.indices((2, 2, 2, 2)).reshape(4, -1).T
    lightness = 255 - inks @ [40, 60, 20, 200]
    lab = np.stack([lightness.clip(0, 255), 128 + inks @ [-60, 70, -5, 0], 128 + inks @ [-40, -5, 80, 0]], 1)
    matrix = struct.pack(">9i", *(65536 * number for number in (1, 0, 0, 0, 1, 0, 0, 0, 1)))
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + matrix + ramp * 4 + lab.clip(0, 255).astype(np.uint8).tobytes()
    return profile(b"CMYK", b"prtr", b"Lab ", A2B0=table + ramp * 3)


PROFILES = {
    "P3": of_primaries(P3, SRGB_CURVE),
    "Adobe RGB": of_primaries(ADOBE_RGB, gamma(563 / 256)),
    "grey with gamma": profile(b"GRAY", kTRC=gamma(1.8)),
    "CMYK": of_ink(),
}


def by_littlecms(image, icc):
    """Convert an image with LittleCMS."""
    source = SRGB if icc is None else ImageCms.ImageCmsProfile(io.BytesIO(icc))
    return np.asarray(ImageCms.profileToProfile(image, source, SRGB, outputMode="RGB")).astype(int)


def pixels(path):
    return np.asarray(open_image(path)).astype(int)


@pytest.mark.parametrize(
    ("name", "mode", "suffix"),
    [
        ("P3", "RGB", ".webp"),
        ("grey with gamma", "L", ".jpg"),
        ("CMYK", "CMYK", ".jpg"),
    ],
)
def test_embedded_profile_is_read_as_littlecms_reads_it(tmp_path, name, mode, suffix):
    path = tmp_path / f"x{suffix}"
    photograph("astronaut", *SIZE).convert(mode).save(path, icc_profile=PROFILES[name])
    with Image.open(path) as image:
        plain, expected = np.asarray(image.convert("RGB")).astype(int), by_littlecms(image, PROFILES[name])
    assert np.array_equal(pixels(path), expected)
    assert np.abs(pixels(path) - plain).max() > 10, "the profile changes something"
    assert image_facts(path).colours == "srgb"


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_and_rotation_keep_working(tmp_path, mode):
    icc = PROFILES["grey with gamma" if mode == "LA" else "P3"]
    image = photograph("astronaut", *SIZE).convert(mode)
    alpha = Image.new("L", SIZE, 255)
    alpha.paste(0, (0, 0, 24, 32))
    image.putalpha(alpha)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "x.png", icc_profile=icc, exif=exif)
    expected = by_littlecms(image.convert("L" if mode == "LA" else "RGB"), icc)
    expected[:, :24] = 255
    assert np.array_equal(pixels(tmp_path / "x.png"), np.rot90(expected, -1))


def test_sixteen_bits_of_linear_grey_keep_their_shadows(tmp_path):
    """Converted in 8 bits, the darkest levels would be 0 and 13."""
    icc = profile(b"GRAY", kTRC=gamma(1.0))
    ramp = np.tile(np.linspace(0, 800, 48).astype(np.uint16), (32, 1))
    Image.fromarray(ramp).save(tmp_path / "x.png", icc_profile=icc)
    light = ramp[0] / 65535
    expected = 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    assert np.abs(pixels(tmp_path / "x.png")[0, :, 0] - expected).max() <= 1


def test_lab_is_read(tmp_path):
    lab = Image.fromarray(np.full((32, 48, 3), (160, 40, 20), np.uint8), "RGB")
    lab = Image.frombytes("LAB", SIZE, lab.tobytes())
    lab.save(tmp_path / "x.tiff")
    expected = ImageCms.profileToProfile(lab, ImageCms.createProfile("LAB"), SRGB, outputMode="RGB")
    assert np.array_equal(pixels(tmp_path / "x.tiff"), np.asarray(expected))


@pytest.mark.parametrize(
    ("space", "index", "adobe"), [(1, "R98", False), (2, "R03", True), (65535, "R03", True), (65535, "R98", False)]
)
def test_exif_of_a_camera_specifies_adobe_rgb(tmp_path, space, index, adobe):
    image = photograph("astronaut", *SIZE)
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0xA001] = space
    exif.get_ifd(0x8769)[0xA005] = {1: index}
    image.save(tmp_path / "x.jpg", exif=exif, quality=95)
    with Image.open(tmp_path / "x.jpg") as plain:
        expected = by_littlecms(plain, PROFILES["Adobe RGB"]) if adobe else np.asarray(plain)
    assert np.abs(pixels(tmp_path / "x.jpg") - expected).max() <= 1
    assert image_facts(tmp_path / "x.jpg").colours == ("srgb" if adobe else "")


def test_profiles_of_srgb_change_no_pixel_and_no_cache(tmp_path):
    image = photograph("astronaut", *SIZE)
    curve = b"curv" + bytes(4) + struct.pack(">I", 1024)  # a table, as in the profile of 1996
    light = np.linspace(0, 1, 1024)
    light = np.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4)
    curve += (65535 * light).round().astype(">u2").tobytes()
    of_1996 = of_primaries(
        ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.7141)), curve
    )
    for icc in (of_1996, ImageCms.ImageCmsProfile(SRGB).tobytes()):
        for mode in ("RGB", "L"):
            image.convert(mode).save(tmp_path / "x.png", icc_profile=icc)
            assert np.array_equal(pixels(tmp_path / "x.png"), np.asarray(image.convert(mode).convert("RGB")))
            assert image_facts(tmp_path / "x.png").colours == ""


D65 = (0.3127, 0.3290)
SRGB_XY, P3_XY = (0.64, 0.33, 0.30, 0.60, 0.15, 0.06), (0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
HEX = (200, 60, 50)


def png(colour, *chunks, depth=8, kind=2):
    """Return a PNG of 16x16 pixels of one colour, or of rows of bytes, with these chunks before its pixels."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    row = b"\0" + (colour if isinstance(colour, bytes) else bytes(colour) * 16)
    head = struct.pack(">IIBBBBB", 16, 16, depth, kind, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(row * 16)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in parts)


def gama(value):
    return b"gAMA", struct.pack(">I", round(value * 1e5))


def iccp(icc):
    return b"iCCP", b"x\0\0" + zlib.compress(icc)


def chrm(primaries):
    return b"cHRM", struct.pack(">8I", *(round(value * 1e5) for value in (*D65, *primaries)))


@pytest.mark.parametrize(
    ("colour", "chunks", "expected"),
    [
        ((128,) * 3, [gama(1.0)], (188,) * 3),
        ((128,) * 3, [gama(1 / 1.8)], (147,) * 3),
        ((128,) * 3, [gama(0.45455)], (128,) * 3),
        ((128,) * 3, [(b"sRGB", b"\0"), gama(1.0)], (128,) * 3),
        (HEX, [gama(0.45455), chrm(SRGB_XY)], HEX),
        (HEX, [gama(0.45455), chrm(P3_XY)], (217, 42, 39)),
        (HEX, [chrm(P3_XY)], (217, 42, 39)),
        (HEX, [(b"cICP", bytes((12, 13, 0, 1)))], (217, 42, 39)),
        (HEX, [(b"cICP", bytes((12, 13, 0, 1))), (b"sRGB", b"\0")], (217, 42, 39)),
        (HEX, [(b"cICP", bytes((1, 13, 0, 1))), gama(1.0)], HEX),
        ((128,) * 3, [(b"cICP", bytes((1, 8, 0, 1)))], (188,) * 3),
        (HEX, [iccp(PROFILES["P3"]), gama(1.0)], (217, 42, 39)),
        (HEX, [(b"cICP", bytes((1, 13, 0, 1))), iccp(PROFILES["P3"])], HEX),
    ],
)
def test_chunks_of_a_png_name_its_colours(tmp_path, colour, chunks, expected):
    (tmp_path / "x.png").write_bytes(png(colour, *chunks))
    assert image_facts(tmp_path / "x.png").colours == ("srgb" if expected != colour else "")
    assert open_image(tmp_path / "x.png").getpixel((3, 3)) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("transfer", "name"), [(16, "PQ"), (18, "HLG")])
def test_images_of_high_dynamic_range_are_refused(tmp_path, transfer, name):
    (tmp_path / "x.png").write_bytes(png(HEX, (b"cICP", bytes((9, transfer, 0, 1)))))
    icc = PROFILES["P3"] + b"cicp\0\0\0\0" + bytes((9, transfer, 0, 1))
    photograph("coffee", *SIZE).save(tmp_path / "x.jpg", icc_profile=icc)
    photograph("coffee", *SIZE).save(tmp_path / "x.avif")
    content = (tmp_path / "x.avif").read_bytes()
    at = content.index(b"colrnclx") + 8
    (tmp_path / "x.avif").write_bytes(content[:at] + struct.pack(">HH", 9, transfer) + content[at + 4 :])
    for suffix in ("png", "jpg", "avif"):
        for read in (image_facts, open_image):
            with pytest.raises(UserError, match=rf"x\.{suffix}: it is HDR \({name}\), save it as sRGB"):
                read(tmp_path / f"x.{suffix}")


def test_colours_of_an_avif_are_those_that_its_header_names(tmp_path):
    Image.new("RGB", (64, 64), HEX).save(tmp_path / "x.avif", quality=100, subsampling="4:4:4")
    plain = open_image(tmp_path / "x.avif").getpixel((9, 9))
    content = (tmp_path / "x.avif").read_bytes()
    at = content.index(b"colrnclx") + 8
    (tmp_path / "x.avif").write_bytes(content[:at] + struct.pack(">HH", 12, 13) + content[at + 4 :])
    assert plain == pytest.approx(HEX, abs=2)
    assert open_image(tmp_path / "x.avif").getpixel((9, 9)) == pytest.approx((217, 42, 39), abs=3)


UNUSABLE = [iccp(b"junk" * 40), iccp(PROFILES["CMYK"]), (b"cICP", bytes((77, 13, 0, 1))), gama(0), chrm((0,) * 6)]


@pytest.mark.parametrize("chunk", UNUSABLE)
def test_colours_that_cannot_be_honoured_are_noted_once_with_the_file(tmp_path, caplog, chunk):
    (tmp_path / "x.png").write_bytes(png(HEX, chunk))
    with caplog.at_level(logging.WARNING, "retouch"):
        assert [image_facts(tmp_path / "x.png").colours for _ in range(2)] == ["", ""]
    [note] = caplog.messages
    assert note.startswith(f"note: {tmp_path}/x.png: its colour profile cannot be used (")
    assert open_image(tmp_path / "x.png").getpixel((3, 3)) == HEX


@pytest.mark.parametrize(
    ("depth", "kind", "row", "hidden"),
    [
        (16, 0, struct.pack(">16H", *([300] * 8 + [40000] * 8)), (300,)),
        (16, 2, struct.pack(">48H", *([1000, 2000, 3000] * 8 + [40000] * 24)), (1000, 2000, 3000)),
        (4, 0, bytes([0x55] * 4 + [0x77] * 4), (5,)),
        (2, 0, bytes([0b01010101] * 2 + [0b10101010] * 2), (1,)),
        (1, 0, bytes([0xFF, 0]), (1,)),
    ],
)
def test_transparent_colour_of_a_png_counts_at_every_depth(tmp_path, depth, kind, row, hidden):
    chunk = (b"tRNS", struct.pack(f">{len(hidden)}H", *hidden))
    (tmp_path / "x.png").write_bytes(png(row, chunk, depth=depth, kind=kind))
    assert image_facts(tmp_path / "x.png").alpha
    alpha = np.asarray(open_image(tmp_path / "x.png", alpha=True))[..., 3]
    assert set(alpha[:, :8].flat) == {0}
    assert set(alpha[:, 8:].flat) == {255}
    assert open_image(tmp_path / "x.png").getpixel((0, 0)) == (255, 255, 255)


def test_values_of_a_mask_are_no_colours(tmp_path):
    Image.new("L", SIZE, 128).save(tmp_path / "m.png", icc_profile=PROFILES["grey with gamma"])
    assert load_mask(tmp_path / "m.png", Window.whole(SIZE)).unique().tolist() == pytest.approx([128 / 255])


def test_cache_key_changes_only_if_a_profile_changes_pixels(tmp_path):
    """Checksums of images without a profile stay as they were."""
    image = photograph("astronaut", *SIZE)
    for name, icc in (("plain", None), ("p3", PROFILES["P3"]), ("damaged", b"junk" * 40)):
        image.save(tmp_path / f"{name}.png", icc_profile=icc)
    image.convert("L").save(tmp_path / "mask.png", icc_profile=PROFILES["grey with gamma"])
    paths = {path.stem: path for path in tmp_path.glob("*.png")}
    remembered = [(*hash_file(path), *image_facts(path), False) for path in paths.values()]
    (tmp_path / "files.jsonl").write_text("".join(map(FileHashes.line, remembered)))
    hashes = FileHashes([tmp_path / "files.jsonl"])
    sample = Sample("x", paths["plain"], (paths["p3"], paths["damaged"]), ("",), paths["mask"])
    checksums = {path.stem: hash_file(path)[4] for path in paths.values()}
    assert Content.of(sample, hashes).checksums == [
        ("target", checksums["plain"]),
        ("control", f"{checksums['p3']}srgb"),
        ("control", checksums["damaged"]),
        ("mask", checksums["mask"]),
    ]
