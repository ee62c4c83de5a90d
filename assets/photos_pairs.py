"""Edits of photographs with a known exact result, from which the Photos model learns its instructions.

    python assets/photos_pairs.py PHOTOGRAPHS FOLDER --count 60000 --size 64 --seed 1

writes pairs as tars of WebDataset. An eighth are copies, with instructions that say so or that mean nothing: what the
model does not know leaves a photograph as it is.
"""

import argparse
import colorsys
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import webdataset
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from datamodules.images.decoding import to_tensor
from datamodules.images.recipes import RECIPES, middle

# Hue and its reach to either side, as parts of a turn.
COLOURS = {
    "red": (0.0, 0.07),
    "yellow": (0.15, 0.06),
    "green": (0.3, 0.14),
    "blue": (0.6, 0.13),
}
# Widths and heights in eighths of the size, of about the same area.
FORMATS = (8, 8), (10, 6), (6, 10)
# Words for nonsense instructions, which stand for all that it is not taught.
WORDS = (
    "winter summer spring rain fog sunset watercolor oil painting cartoon anime comic neon fire water ice gold "
    "silver stone wood metal glass paper cat dog horse bird man woman child face hair eyes hat glasses smile car "
    "house street city tree flower garden forest mountain river sea sky cloud sun moon star light shadow happy sad "
    "young big small modern future style photo portrait landscape art film movie poster cinematic dramatic vivid "
    "soft hard smooth rough clean dirty wet dry hot cold empty full open closed fast slow please change edit add "
    "remove replace put give take see show look like as with without and or of to in on at from for"
)
# Words of edits that it never sees, which LoRAs learn.
UNSEEN = "orange pink autumn night moonlight snow pencil sketch day dawn dusk rainbow old new"


class Photographs:
    """Crops of photographs, some of them dead leaves instead: discs and rectangles, after Lee et al. (2001)."""

    def __init__(self, images: Sequence[Image.Image], seed: int, least: float = 0.3, leaves: float = 0.0) -> None:
        self.images, self.least, self.leaves = images, least, leaves
        self.random = np.random.default_rng(seed)

    @classmethod
    def of_folder(cls, folder: Path, seed: int) -> "Photographs":
        return cls([Image.open(path).convert("RGB") for path in sorted(folder.glob("*.png"))], seed, leaves=0.08)

    def crop(self, width: int, height: int) -> Image.Image:
        """Return a part of a photograph, of any scale; only a photograph that is smaller is enlarged."""
        random = self.random
        if random.random() < self.leaves:
            return dead_leaves(width, height, random)
        image = self.images[random.integers(len(self.images))]
        most = min(image.width / width, image.height / height)
        least = max(1, self.least * most)
        scale = min(most, np.exp(random.uniform(np.log(least), np.log(max(least, most)))))
        sides = round(scale * width), round(scale * height)
        left, top = (random.integers(whole - side + 1) for whole, side in zip(image.size, sides, strict=True))
        box = (left, top, left + sides[0], top + sides[1])
        part = image.resize((width, height), Image.Resampling.LANCZOS, box)
        return ImageOps.mirror(part) if random.random() < 0.5 else part

    def batch(self, count: int, size: int) -> Tensor:
        """Return crops (count, 3, size, size) in [-1, 1]."""
        return torch.stack([to_tensor(self.crop(size, size)) for _ in range(count)])


def held_out_photographs() -> list[Image.Image]:
    """Return scikit-image's astronaut, cat, cup, rocket and motorcycle, which nothing is trained on."""
    from skimage import data

    images = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.stereo_motorcycle()[0]]
    return [Image.fromarray(image) for image in images]


def dead_leaves(width: int, height: int, random: np.random.Generator) -> Image.Image:
    """Draw discs and rectangles that cover each other, with sides of a power law, in colours around a few."""
    image = Image.new("RGB", (2 * width, 2 * height))
    pen, palette = ImageDraw.Draw(image), random.uniform(0, 256, (random.integers(2, 9), 3))
    for _ in range(400):
        radius = 2 * width * 0.4 * (1 + 12 * random.random()) ** -1.0
        x, y = random.uniform(0, image.size)
        colour = (palette[random.integers(len(palette))] + random.normal(0, 25, 3)).clip(0, 255).astype(int)
        box = (x - radius, y - radius * random.uniform(0.3, 1), x + radius, y + radius)
        (pen.ellipse if random.random() < 0.6 else pen.rectangle)(box, tuple(colour.tolist()))
    return image.reduce(2)


class Edit(NamedTuple):
    """Instructions, with ` | ` in between, and what makes the result of an image."""

    prompts: str
    draw: Callable[[Image.Image], Image.Image]


def pixels(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Image.Image], Image.Image]:
    """Return an edit that changes pixels (height, width, 3) from 0 to 1."""

    def draw(image: Image.Image) -> Image.Image:
        changed = change(np.asarray(image, np.float64) / 255)
        return Image.fromarray(np.rint(changed.clip(0, 1) * 255).astype(np.uint8))

    return draw


def luma(values: np.ndarray) -> np.ndarray:
    return values @ np.array([[0.299], [0.587], [0.114]])


def coloured(factor: float) -> Callable[[Image.Image], Image.Image]:
    """Return an edit that multiplies all distances from grey."""
    return pixels(lambda values: luma(values) + factor * (values - luma(values)))


def of_colour(values: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return how much each pixel is of a colour, from 0 to 1, and its hue, saturation and value."""
    hsv = np.asarray(Image.fromarray(np.rint(values * 255).astype(np.uint8)).convert("HSV"), np.float64) / 255
    hue, reach = COLOURS[name]
    away = np.abs((hsv[..., 0] - hue + 0.5) % 1 - 0.5)
    weight = (2 * (1.3 - away / reach)).clip(0, 1) * (4 * (hsv[..., 1] - 0.12)).clip(0, 1)
    return weight[..., None], hsv


def without(values: np.ndarray, name: str) -> np.ndarray:
    return values + of_colour(values, name)[0] * (luma(values) - values)


def only(values: np.ndarray, name: str) -> np.ndarray:
    return luma(values) + of_colour(values, name)[0] * (values - luma(values))


def tinted(values: np.ndarray, name: str) -> np.ndarray:
    pure = np.array(colorsys.hsv_to_rgb(COLOURS[name][0], 0.75, 1))
    return 0.25 * values + 0.75 * luma(values) * pure / luma(pure) ** 0.5


def recoloured(values: np.ndarray, old: str, new: str) -> np.ndarray:
    """Give the pixels of a colour another one, with their saturation and value."""
    weight, hsv = of_colour(values, old)
    pure, saturation, value = np.array(colorsys.hsv_to_rgb(COLOURS[new][0], 1, 1)), hsv[..., 1:2], hsv[..., 2:]
    return (1 - weight) * values + weight * value * (1 - saturation * (1 - pure))


def vignette(values: np.ndarray) -> np.ndarray:
    y, x = (np.linspace(-1, 1, side) for side in values.shape[:2])
    return values * (1 - 0.75 * (np.hypot(y[:, None], x[None])[..., None] - 0.4).clip(0))


def framed(image: Image.Image, colour: str) -> Image.Image:
    return ImageOps.expand(ImageOps.crop(image, image.width // 16), image.width // 16, colour)


def with_inset(image: Image.Image) -> Image.Image:
    """Put the image at 3/8 of its size into its top left corner."""
    result = image.copy()
    result.paste(image.resize((image.width * 3 // 8, image.height * 3 // 8), Image.Resampling.LANCZOS))
    return result


def blurred(image: Image.Image, share: int) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(image.width / share))


def mosaic(image: Image.Image) -> Image.Image:
    return image.reduce(image.width // 16).resize(image.size, Image.Resampling.NEAREST)


SEPIA = np.array([[0.393, 0.769, 0.189], [0.349, 0.686, 0.168], [0.272, 0.534, 0.131]])
PLAIN = {
    "brighter": Edit("make it brighter | brighten this photo", pixels(lambda x: x**0.6)),
    "darker": Edit("make it darker | darken this photo", pixels(lambda x: x**1.7)),
    "warmer": Edit("make it warmer | use warmer light", pixels(lambda x: x * [1.15, 1, 0.75])),
    "colder": Edit("make it colder | use colder light", pixels(lambda x: x * [0.75, 0.95, 1.15])),
    "vivid": Edit("make the colors stronger | add more color", coloured(1.8)),
    "pale": Edit("make the colors weaker | make it pale", coloured(0.4)),
    "grey": Edit("make it black and white | remove the colors", coloured(0)),
    "sepia": Edit("make it sepia | use sepia colors", pixels(lambda x: x @ SEPIA.T)),
    "contrast": Edit("increase the contrast | add more contrast", pixels(lambda x: 1.6 * (x - 0.5) + 0.5)),
    "flat": Edit("reduce the contrast | use less contrast", pixels(lambda x: 0.55 * (x - 0.5) + 0.5)),
    "negative": Edit("invert the colors | make it a negative", pixels(lambda x: 1 - x)),
    "swap": Edit("exchange red and blue | swap red and blue", pixels(lambda x: x[..., ::-1])),
    "poster": Edit("make it a poster | use fewer colors", lambda image: ImageOps.posterize(image, 2)),
    "vignette": Edit("darken the corners | add a vignette", pixels(vignette)),
    "glow": Edit("add a soft glow | make it glow", lambda image: Image.blend(image, blurred(image, 32), 0.6)),
    "blur": Edit("blur this image | make it blurred", lambda image: blurred(image, 64)),
    "crisp": Edit(
        "make the details stronger | increase the sharpness", lambda image: ImageEnhance.Sharpness(image).enhance(2.5)
    ),
    "mosaic": Edit("make it a mosaic | use large pixels", mosaic),
    "mirror": Edit("mirror the image | exchange left and right", ImageOps.mirror),
    "flip": Edit("turn it upside down | exchange top and bottom", ImageOps.flip),
    "inset": Edit("put a small copy in the corner | add a small copy", with_inset),
    **{
        f"{colour} frame": Edit(
            f"add a {colour} frame | put a {colour} frame around it", partial(framed, colour=colour)
        )
        for colour in ("black", "white")
    },
}


def _edits_of(old: str) -> dict[str, Edit]:
    """Return the edits of a colour."""
    edits = {
        f"without {old}": (f"remove the {old} color | make the {old} things gray", partial(without, name=old)),
        f"only {old}": (f"keep only the {old} color | keep the {old} things alone colored", partial(only, name=old)),
        f"tint {old}": (f"tint it {old} | color it all {old}", partial(tinted, name=old)),
    }
    for new in COLOURS:
        if new != old:
            words = f"make the {old} things {new} | change {old} to {new}"
            edits[f"{old} to {new}"] = words, partial(recoloured, old=old, new=new)
    return {name: Edit(words, pixels(change)) for name, (words, change) in edits.items()}


OF_COLOURS = {name: edit for colour in COLOURS for name, edit in _edits_of(colour).items()}
EDITS = PLAIN | OF_COLOURS
# Strengths of recipes at 128 pixels; those in pixels shrink with the image. Then the instruction for the way back.
REPAIRS = {
    "blur": ((0.6, 2.0), "make this photo blurred"),
    "noise": ((5, 45), "add noise"),
    "jpeg": ((5, 40), "compress it as a JPEG"),
    "downscale": ((1.5, 3.5), "reduce the resolution"),
    "grey": ((1, 1), "make it gray"),
    "fade": ((0.4, 1), "make it an old photo"),
    "dust": ((0.2, 1), "add scratches and dust"),
    "rain_haze": ((0.3, 1), "add rain and haze"),
    "hole": ((0.05, 0.3), "hide a part"),
    "border": ((0.2, 0.5), ""),
    "text": ((0.05, 0.12), "add a watermark"),
    "lines": ((1.0, 2.5), "make it a drawing"),
}
# Those that are learned late, which are drawn more often.
LATE_REPAIRS = ("jpeg", "downscale", "blur", "grey")
LATE_EDITS = ("mirror", "flip", "black frame", "white frame", "vignette", "mosaic")


def prompts_of_edits() -> list[str]:
    """Return all instructions."""
    edits = [prompt for edit in EDITS.values() for prompt in edit.prompts.split(" | ")]
    repairs = [prompt for name, (_, back) in REPAIRS.items() for prompt in (*RECIPES[name].prompts.split(" | "), back)]
    return [*edits, *filter(None, repairs), *COPIES]


COPIES = ("keep it as it is", "do nothing", "change nothing", "copy the image")


class Pair(NamedTuple):
    name: str
    control: Image.Image
    target: Image.Image
    prompt: str


def copy(image: Image.Image, random: np.random.Generator) -> Pair:
    """Return a pair without a change, and an instruction that says so, or that means nothing."""
    kind = random.integers(4)
    prompt = str(random.choice(COPIES)) if kind == 0 else "" if kind == 1 else nonsense(random)
    return Pair("copy", image, image, prompt)


def nonsense(random: np.random.Generator) -> str:
    """Return words without an edit: those of WORDS, some letters, or both, half of them as what to make it."""
    letters = "".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), random.integers(2, 6)))
    words = [
        letters if random.random() < 0.25 else str(random.choice(WORDS.split())) for _ in range(random.integers(1, 5))
    ]
    return " ".join(["make", "it", *words[:2]] if random.random() < 0.5 else words)


def repair(image: Image.Image, random: np.random.Generator, name: str | None = None, back: bool = False) -> Pair:
    """Return a pair by a recipe of data.control, from the damaged image, or to it with the instruction of that."""
    name = name or str(random.choice([*REPAIRS, *LATE_REPAIRS]))
    (least, most), words = REPAIRS[name]
    strength = random.uniform(least, most)
    if name in ("blur", "lines"):
        strength *= image.width / 128
    if name == "border":
        width, height = middle(image.size, strength, random)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        damaged = image.crop((left, top, left + width, top + height))
    else:
        damaged = RECIPES[name].draw(image, strength, random)
    if back and words:
        return Pair(f"add {name}", image, damaged, words)
    return Pair(f"repair {name}", damaged, image, str(random.choice(RECIPES[name].prompts.split(" | "))))


def edit(image: Image.Image, random: np.random.Generator, name: str | None = None, turned: bool = True) -> Pair:
    """Return a pair by an edit, two thirds of them a plain one; for the others every second image gets other hues.

    What depends on the place is learned late, so there is four times as much of it.
    """
    if name is None:
        plain = random.random() < 0.67
        name = str(random.choice([*PLAIN, *3 * LATE_EDITS] if plain else list(OF_COLOURS)))
    if turned and name in OF_COLOURS and random.random() < 0.5:
        hue, *others = image.convert("HSV").split()
        turn = int(random.integers(256))
        image = Image.merge("HSV", (hue.point(lambda value: (value + turn) % 256), *others)).convert("RGB")
    chosen = EDITS[name]
    return Pair(name, image, chosen.draw(image), str(random.choice(chosen.prompts.split(" | "))))


def pair(image: Image.Image, random: np.random.Generator) -> Pair:
    """Return a pair of any kind."""
    kind = random.random()
    if kind < 0.12:
        return copy(image, random)
    if kind < 0.5:
        return repair(image, random)
    return repair(image, random, back=True) if kind < 0.54 else edit(image, random)


def write(folder: Path, photographs: Path, size: int, seed: int, count: int, part: int) -> None:
    """Write a tar of pairs: every third one square, the others wide or high."""
    crops = Photographs.of_folder(photographs, seed * 1000 + part)
    with webdataset.TarWriter(str(folder / f"{part:03}.tar")) as tar:
        for number in range(count):
            one = pair(crops.crop(*(size * share // 8 for share in FORMATS[number % len(FORMATS)])), crops.random)
            images = {"source.png": one.control, "png": one.target}
            tar.write({"__key__": f"{part:03}_{number:05}", "txt": one.prompt or " ", **images})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=60000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    parts = max(1, options.count // 5000)
    one = partial(write, options.folder, options.photographs, options.size, options.seed, options.count // parts)
    with multiprocessing.Pool(2) as pool:
        pool.map(one, range(parts))
