"""A file becomes the tensor that the diffusers pipelines would make of it."""

import io
import os
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from datamodules.images.decoding import floor_size, image_size, open_image, open_mask, verify_image, verify_mask
from datamodules.images.samples import Slice
from datamodules.images.windows import ConditionImages, Window, load_image, load_mask
from foundation.errors import UserError
from tests.support.pictures import photograph

SIZE = (48, 32)


def own_size(path):
    """Decode an image at its own size."""
    return load_image(path, Window.whole(floor_size(*image_size(path))))


@pytest.fixture
def image():
    return photograph("coffee", *SIZE)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_tensor_equals_diffusers_preprocessing(image, tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    image.save(path)
    expected = VaeImageProcessor(vae_scale_factor=16).preprocess(Image.open(path))[0]
    assert torch.equal(own_size(path), expected)


def test_sides_are_floored_to_16_by_resizing_as_diffusers_does(tmp_path):
    photograph("coffee", 47, 33).save(tmp_path / "x.png")
    expected = VaeImageProcessor(vae_scale_factor=16).preprocess(Image.open(tmp_path / "x.png"))[0]
    own = own_size(tmp_path / "x.png")
    assert own.shape == (3, 32, 32)
    assert torch.equal(own, expected)


# JPEG 2000, BMP, GIF and PPM hold no EXIF.
@pytest.mark.parametrize("suffix", ["tif", "jpg", "png", "webp", "avif", "jp2", "bmp", "gif", "ppm"])
@pytest.mark.parametrize("orientation", range(10))
def test_header_and_pixels_are_turned_by_one_rule(image, tmp_path, suffix, orientation):
    path, exif = tmp_path / f"x.{suffix}", Image.Exif()
    exif[0x0112] = orientation
    stored = image.rotate(90, expand=True)
    stored.save(path, exif=exif)
    turned = orientation in range(5, 9) and suffix in ("tif", "jpg", "png", "webp", "avif")
    assert image_size(path) == open_image(path).size == (SIZE if turned else SIZE[::-1])
    if suffix in ("tif", "png"):
        ways = dict(zip(range(2, 9), (0, 3, 1, 5, 4, 6, 2), strict=True))  # of PIL's Transpose
        expected = stored.transpose(Image.Transpose(ways[orientation])) if orientation in ways else stored
        assert np.array_equal(open_image(path), expected)


# The first five and 16 bits were mapped by PIL, from a path only, at the turned size; a palette in a tar never was.
@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16", "I;16B", "1", "LA", "RGB"])
@pytest.mark.parametrize("orientation", range(5, 9))
def test_uncompressed_tiffs_of_one_strip_are_turned_like_compressed_ones(tmp_path, mode, orientation):
    levels = np.random.default_rng(0).integers(0, 256, (32, 48, 4), dtype=np.uint8)
    if mode.startswith("I"):
        stored = Image.fromarray((levels[..., 0].astype(int) * 257).astype({"I;16": "<u2", "I;16B": ">u2"}[mode]))
    else:
        stored = Image.fromarray(levels).convert("RGB").convert(mode) if mode != "RGBA" else Image.fromarray(levels)
    for name, more in {"plain": {}, "packed": {"compression": "tiff_lzw"}}.items():
        stored.save(tmp_path / f"{name}.tif", tiffinfo={0x0112: orientation}, **more)
    plain, packed = tmp_path / "plain.tif", tmp_path / "packed.tif"
    assert image_size(plain) == open_image(plain).size == SIZE[::-1]
    assert np.array_equal(open_image(plain), open_image(packed))
    if mode in ("L", "1", "I;16"):
        assert np.array_equal(open_mask(plain), open_mask(packed))
    with plain.open("ab") as file:  # in a container
        assert np.array_equal(open_image(Slice("x", str(plain), 0, file.tell())), open_image(packed))


def test_pixels_of_another_size_than_the_headers_are_refused(image, tmp_path, monkeypatch):
    image.save(tmp_path / "x.png")
    monkeypatch.setattr("PIL.ImageOps.exif_transpose", lambda image, in_place: image.thumbnail((16, 16)))
    with pytest.raises(UserError, match=r"x\.png: its header gives 48x32 pixels, its content 16x"):
        open_image(tmp_path / "x.png")


def test_orientation_of_a_tiff_that_only_xmp_names(image, tmp_path):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><r tiff:Orientation="6"/></x:xmpmeta>'
    image.save(tmp_path / "x.tif", tiffinfo={700: xmp})
    assert image_size(tmp_path / "x.tif") == open_image(tmp_path / "x.tif").size == SIZE[::-1]


def test_grey_levels_of_other_depths_and_inverted_ones_are_refused(tmp_path):
    Image.fromarray(np.full((32, 32), 2**31 - 1, np.int32)).save(tmp_path / "deep.tif")
    Image.fromarray(np.full((32, 32), 60000, np.uint16)).save(tmp_path / "inverted.tif", tiffinfo={262: 0})
    for name in ("deep", "inverted"):
        with pytest.raises(UserError, match=r"neither of 8 nor of 16 bits, or inverted: save it with 8 or 16 bits"):
            image_size(tmp_path / f"{name}.tif")


def test_rotation_stored_after_a_pngs_pixels_counts(image, tmp_path):
    image.save(tmp_path / "x.png")
    data = (tmp_path / "x.png").read_bytes()
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    late = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "x.png").write_bytes(data[:-12] + late + data[-12:])
    assert image_size(tmp_path / "x.png") == open_image(tmp_path / "x.png").size == (32, 48)


def test_alpha_is_laid_on_white(image, tmp_path):
    alpha = Image.new("L", SIZE, 255)
    alpha.paste(0, (0, 0, 24, 32))
    alpha.paste(128, (24, 0, 30, 32))
    image.putalpha(alpha)
    image.save(tmp_path / "x.png")
    own = np.asarray(open_image(tmp_path / "x.png")).astype(float)
    pixels, weight = np.asarray(image)[..., :3].astype(float), np.asarray(alpha)[..., None] / 255
    assert np.abs(own - (pixels * weight + 255 * (1 - weight))).max() <= 1


def test_transparent_palette_entry_becomes_white(tmp_path):
    image = Image.new("P", SIZE, 0)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(1, (0, 0, 24, 32))
    image.save(tmp_path / "x.png", transparency=0)
    opened = open_image(tmp_path / "x.png")
    assert opened.getpixel((0, 0)) == (200, 100, 50)
    assert opened.getpixel((47, 0)) == (255, 255, 255)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    ramp = np.tile(np.linspace(0, 65535, 48).astype(np.uint16), (32, 1))
    Image.fromarray(ramp).save(tmp_path / "x.png")
    assert np.array_equal(np.asarray(open_image(tmp_path / "x.png"))[..., 0], ramp >> 8)


def test_mask_is_brightness_at_the_targets_size(tmp_path):
    mask = Image.new("L", (96, 64), 0)
    mask.paste(255, (0, 0, 48, 64))
    mask.save(tmp_path / "m.png")
    loaded = load_mask(tmp_path / "m.png", Window.whole(SIZE))
    assert loaded.shape == (1, 32, 48)
    assert loaded[..., :20].min() == 1
    assert loaded[..., 28:].max() == 0


def test_transparent_mask_is_its_alpha_channel_and_else_refused(image, tmp_path):
    shape = Image.new("L", SIZE)
    shape.paste(255, (0, 0, 24, 32))
    for colour in ("white", "black", "red"):
        mask = Image.new("RGBA", SIZE, colour)
        mask.putalpha(shape)
        mask.save(tmp_path / "m.png")
        assert np.array_equal(open_mask(tmp_path / "m.png"), shape)
    black = Image.new("RGB", SIZE)  # on a transparent colour
    black.paste("white", (0, 0, 24, 32))
    black.save(tmp_path / "m.png", transparency=(0, 0, 0))
    assert np.array_equal(open_mask(tmp_path / "m.png"), shape)
    image.putalpha(shape)
    image.save(tmp_path / "m.png")
    with pytest.raises(UserError, match=r"m\.png has colours and transparent parts: save it without an alpha channel"):
        open_mask(tmp_path / "m.png")
    Image.merge("RGBA", (*image.split()[:3], Image.new("L", SIZE, 255))).save(tmp_path / "m.png")
    assert np.array_equal(open_mask(tmp_path / "m.png"), image.convert("RGB").convert("L"))


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (np.uint16([[0, 1]]), 0),
        (np.uint16([[0, 255]]), 0),
        (np.uint16([[0, 4095]]), 15),
        (np.uint8([[0, 1]]), 1),
        (np.zeros((1, 2), bool), 0),
        (np.zeros((1, 2, 4), np.uint8), 0),
    ],
)
def test_mask_of_zeros_is_refused_with_its_name(tmp_path, mask, most):
    """Nothing would be trained. Programs write 1, not white, for what counts."""
    Image.fromarray(np.tile(mask, (16, 8) + (1,) * (mask.ndim - 2))).save(tmp_path / "m.png")
    with pytest.raises(UserError, match=rf"the mask {tmp_path}/m\.png is nearly black \(at most {most} of 255\)"):
        verify_mask(tmp_path / "m.png")


def test_all_white_mask_is_recognised(tmp_path):
    for level, white in ((255, True), (254, False)):
        Image.new("L", SIZE, level).save(tmp_path / "m.png")
        assert verify_mask(tmp_path / "m.png") == white


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_truncated_file_is_found_without_a_full_decode(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    photograph("coffee", 256, 256).save(path)
    verify_image(path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(UserError, match=f"cannot read the image {path}"):
        verify_image(path)


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 1}, {"quality": 100}]
)
@pytest.mark.parametrize("more", [b"", b"a phone's trailer"])
def test_jpeg_that_was_cut_and_closed_is_found(tmp_path, options, more):
    """A decoder fills the rest with grey, without a word."""
    path = tmp_path / "x.jpg"
    photograph("coffee", 256, 256).save(path, exif=thumbnail(), **options)
    whole = path.read_bytes()
    at = whole.index(b"\xff\xdb")  # bytes may fill the space before a marker
    path.write_bytes(whole[:at] + b"\xff\xff" + whole[at:] + more)
    verify_image(path)
    for kept in (len(whole) * 3 // 4, len(whole) - 600) if "progressive" not in options else (len(whole) * 3 // 4,):
        path.write_bytes(whole[:kept] + b"\xff\xd9" + more)
        open_image(path)  # PIL sees nothing
        with pytest.raises(UserError, match=f"cannot read the image {path}: a part of its pixels is missing"):
            verify_image(path)


def thumbnail():
    """Return EXIF with a JPEG in it, whose end is not that of the image."""
    small = io.BytesIO()
    photograph("coffee", 32, 32).save(small, "JPEG")
    exif = Image.Exif()
    exif[0x927C] = small.getvalue()
    return exif


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA"])
def test_png_with_rows_missing_is_found_though_its_checksums_are_right(tmp_path, mode):
    path = tmp_path / "x.png"
    for size in ((17, 23), (48, 32)):
        photograph("coffee", *size).convert(mode).save(path)
        verify_image(path)
        begin, _, rest = path.read_bytes().partition(b"IDAT")
        length = int.from_bytes(begin[-4:])
        rows = zlib.decompress(rest[:length])
        fewer = b"IDAT" + zlib.compress(rows[: len(rows) * 3 // 4])
        chunk = struct.pack(">I", len(fewer) - 4) + fewer + struct.pack(">I", zlib.crc32(fewer))
        path.write_bytes(begin[:-4] + chunk + rest[length + 4 :])
        with pytest.raises(UserError, match=f"cannot read the image {path}: rows of its pixels are missing"):
            verify_image(path)


def unreadable(path, kind):
    """Make a file, or something else, of that name."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("/nowhere/x.png")
    elif kind == "floats":
        Image.fromarray(np.random.default_rng(0).random((32, 32), np.float32)).save(path, format="TIFF")
    elif kind == "giant":
        head = b"IHDR" + struct.pack(">IIBBBBB", 15_000, 14_000, 8, 2, 0, 0, 0)
        parts = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in (head, b"IDATx")]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe", "it is a pipe or a device"),
        ("dangling", "it is a link to /nowhere/x.png, which is not there"),
        ("floats", "its pixels are neither of 8 nor of 16 bits"),
        ("giant", "it has more than 179 megapixels, shrink it$"),
        ("empty", "it is empty or no image"),
    ],
)
def test_a_file_that_is_no_image_is_refused_at_once(tmp_path, kind, reason):
    unreadable(tmp_path / "x.png", kind)
    with pytest.raises(UserError, match=re.escape(f"cannot read the image {tmp_path}/x.png: ") + reason):
        image_size(tmp_path / "x.png")


@pytest.mark.parametrize(("suffix", "mode"), [(".png", "RGBA"), (".png", "P"), (".jpg", "CMYK")])
def test_image_shrunk_to_a_fraction_looks_the_same(tmp_path, suffix, mode):
    small = photograph("coffee", 64, 48)
    small.resize((1024, 768), Image.Resampling.BICUBIC).convert(mode).save(tmp_path / f"x{suffix}")
    [pixels], _ = ConditionImages().load([tmp_path / f"x{suffix}"], [Window.whole((64, 48))])
    expected = torch.from_numpy(np.array(small)).permute(2, 0, 1)
    assert pixels.shape == (1, 3, 48, 64)
    assert ((pixels[0] + 1) * 127.5 - expected).abs().mean() < (12 if mode == "P" else 3)


def test_format_of_an_image_is_in_its_bytes_not_in_its_name(image, tmp_path):
    image.save(tmp_path / "x.png", "JPEG")
    assert image_size(tmp_path / "x.png") == SIZE
    assert np.array_equal(open_image(tmp_path / "x.png"), Image.open(tmp_path / "x.png").convert("RGB"))
