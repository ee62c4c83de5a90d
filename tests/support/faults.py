"""Pairs of real photographs with edits, and with the faults that task=inspect finds."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

from tests.support.pictures import photograph

# Photographs of scikit-image, unlike each other, one for each edit.
PHOTOGRAPHS = ["astronaut", "chelsea", "coffee", "rocket", "retina", "camera", "brick", "grass", "gravel", "coins"]
SIZE = (512, 384)


def picture(name: str) -> Image.Image:
    """Return a colour photograph, large enough for inspection."""
    return photograph(name, *SIZE).convert("RGB")


def depth(image: Image.Image) -> Image.Image:
    """Return a smooth grey image that follows a photograph, like a depth map."""
    return ImageOps.posterize(image.convert("L").filter(ImageFilter.GaussianBlur(6)).convert("RGB"), 3)


def without_an_object(image: Image.Image) -> Image.Image:
    image = image.copy()
    ImageDraw.Draw(image).ellipse((180, 120, 300, 240), fill=(128, 128, 120))
    return image


def with_a_small_change(image: Image.Image) -> Image.Image:
    """Draw a dot of a fiftieth of the image's width."""
    image = image.copy()
    ImageDraw.Draw(image).ellipse((100, 100, 112, 112), fill=(220, 30, 30))
    return image


def noisy(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, 12, (*image.size[::-1], 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


# By name: photograph -> (control, target).
EDITS: dict[str, Callable[[Image.Image], tuple[Image.Image, Image.Image]]] = {
    "inverted": lambda image: (image, ImageOps.invert(image)),
    "grey": lambda image: (image, ImageOps.autocontrast(image.convert("L")).point(lambda v: 255 - v // 2)),
    "mirrored": lambda image: (image, ImageOps.mirror(image)),
    "brighter": lambda image: (image, ImageEnhance.Brightness(image).enhance(1.3)),
    "removed": lambda image: (image, without_an_object(image)),
    "small_change": lambda image: (image, with_a_small_change(image)),
    "deblurred": lambda image: (image.filter(ImageFilter.GaussianBlur(3)), image),
    "from_edges": lambda image: (image.convert("L").filter(ImageFilter.FIND_EDGES), image),
    "depth": lambda image: (image, depth(image)),
    "another": lambda image: (image, picture("rocket").rotate(180)),
}


def moved(image: Image.Image, x: float, y: float, scale: float = 1.0) -> tuple[Image.Image, Image.Image]:
    """Return the image and its content moved (x, y) right and down and scaled from the middle, without borders."""
    width, height = image.size
    middle, down = width / 2, height / 2
    matrix = (1 / scale, 0, middle - (middle + x) / scale, 0, 1 / scale, down - (down + y) / scale)
    other = image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    border = int(max(abs(x), abs(y)) + abs(scale - 1) * width) + 1
    box = (border, border, width - border, height - border)
    return image.crop(box), other.crop(box)


def recompressed(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def save_pair(root: Path, name: str, control: Image.Image, target: Image.Image, caption: str) -> None:
    for folder in ("training_images", "control_images"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    control.save(root / "control_images" / f"{name}.png")
    target.save(root / "training_images" / f"{name}.png")
    (root / "training_images" / f"{name}.txt").write_text(caption)


def save_edits(root: Path) -> Path:
    """Save a pair for each of `EDITS`, each with another photograph."""
    for name, photo in zip(EDITS, PHOTOGRAPHS, strict=True):
        save_pair(root, name, *EDITS[name](picture(photo)), f"{name.replace('_', ' ')} the {photo}")
    return root


def save_faults(root: Path, held_out: Path) -> set[tuple[str, str]]:
    """Save each fault once and pairs without one, one of them held out too; return the keys and their findings."""
    save_edits(root)
    targets, controls = root / "training_images", root / "control_images"

    def turned(photo: str) -> Image.Image:
        return picture(photo).rotate(180)

    def save(name: str, control: Image.Image, target: Image.Image) -> None:
        save_pair(root, name, control, target, f"a pair about {name}")

    def edited(name: str, photo: str) -> Image.Image:
        image = turned(photo)
        save(name, image, ImageOps.invert(image))
        return image

    save("proportion", turned("astronaut").crop((0, 0, 300, 384)), ImageOps.invert(turned("astronaut")))
    control, target = moved(turned("chelsea"), 9, -6)
    save("shifted", control, ImageOps.invert(target))
    save("scaled", *moved(turned("coffee"), 0, 0, 1.04))
    save("equal", turned("retina"), turned("retina"))
    save("nearly_equal", turned("camera"), recompressed(turned("camera"), 85))
    save("blank_target", turned("clock"), Image.new("RGB", SIZE, "white"))
    save("blank_control", Image.new("RGB", SIZE, (3, 3, 3)), turned("clock"))
    for name, photo, mask in (
        ("mask_white", "brick", Image.new("L", SIZE, 255)),
        ("mask_black", "grass", Image.new("L", SIZE, 0)),
        ("mask_proportion", "moon", picture("clock").resize((300, 384))),
        ("mask_good", "coins", picture("clock").resize((256, 192))),
    ):
        edited(name, photo)
        mask.save(controls / f"{name}_mask.png")
    again = edited("twice_0", "hubble_deep_field")
    save("twice_1", ImageOps.mirror(again), recompressed(ImageOps.invert(again).resize((480, 360)), 80))
    # One control, two edits.
    edited("shared_0", "immunohistochemistry")
    save("shared_1", turned("immunohistochemistry"), with_a_small_change(turned("immunohistochemistry")))
    small = picture("page").transpose(Image.Transpose.ROTATE_90).resize((240, 320))
    save("small", small, ImageOps.invert(small))
    edited("unreadable", "text")
    (targets / "unreadable.png").write_bytes((targets / "unreadable.png").read_bytes()[:5000])
    picture("text").save(controls / "incomplete.png")
    sideways = picture("chelsea").transpose(Image.Transpose.ROTATE_90)
    save_pair(root, "no_caption", sideways, ImageOps.invert(sideways), "")
    gravel = picture("gravel").transpose(Image.Transpose.ROTATE_90)
    save("learned", gravel, ImageOps.invert(gravel))
    save_pair(held_out, "leak", ImageOps.mirror(gravel), recompressed(ImageOps.invert(gravel), 90), "gravel once more")
    rocket = turned("rocket").transpose(Image.Transpose.ROTATE_90)
    save_pair(held_out, "held", rocket, ImageOps.invert(rocket), "a picture of its own")
    found = {
        "duplicate": ["twice_1"],
        "blank": ["blank_target", "blank_control"],
        "mask": ["mask_white", "mask_black", "mask_proportion"],
        "nearly equal": ["nearly_equal"],
        "low resolution": ["small"],
        "empty caption": ["no_caption"],
        "incomplete": [f"{controls}/incomplete.png has no target image {targets}/incomplete.*"],
        **{name: [name] for name in ("leak", "unreadable", "equal", "proportion", "shifted", "scaled")},
    }
    return {(key, finding) for finding, keys in found.items() for key in keys}
