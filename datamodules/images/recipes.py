"""Recipes that make a condition image from a target, and their settings: damage, a part of the image, an outline of it.

Strengths are drawn uniformly from a range. All randomness comes from the generator that a recipe is given.
"""

import difflib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

from datamodules.images.estimators import DEPTH, PEOPLE, POSE, depth, identity, pose
from foundation.errors import UserError

# The image's caption in an instruction.
CAPTION_PLACE = "[caption]"
# Colours of faded paper, of holes, and of haze.
PAPER, GRAY, AIR = (236, 220, 180), (128, 128, 128), 225.0
# Sides by which marks are scaled, and the factor at which they are drawn, for smooth edges.
UNIT, SMOOTH = 512, 2
# What other programs call a recipe, or the repair that it teaches.
OTHER_NAMES = {
    name: recipe
    for recipe, names in {
        "blur": "deblur unblur defocus",
        "noise": "denoise grain gaussian",
        "jpeg": "jpg compression artifacts dejpeg",
        "downscale": "upscale super_resolution superres sr resize lowres pixelate",
        "grey": "gray greyscale grayscale bw black_and_white colorize colourize colorise colourise colorization",
        "fade": "restore old_photo sepia vintage",
        "dust": "scratches scratch",
        "rain_haze": "rain haze fog derain dehaze defog",
        "hole": "inpaint inpainting mask fill outfill object_removal",
        "border": "outpaint outpainting uncrop extend crop",
        "text": "watermark",
        "edges": "canny edge",
        "lines": "lineart line_art sketch scribble hed softedge line",
        "depth": "midas zoe depth_anything",
        "pose": "openpose dwpose skeleton",
    }.items()
    for name in names.split()
}
WORDS = ("SAMPLE", "PREVIEW", "DRAFT", "PROOF", "COPYRIGHT", "DO NOT COPY", "Summer holidays", "12/08/1998 14:05")


# Damage.


def blur(image: Image.Image, sigma: float, random: np.random.Generator) -> Image.Image:
    """Blur by a Gaussian of `sigma` pixels."""
    return image.filter(ImageFilter.GaussianBlur(sigma))


def noise(image: Image.Image, sigma: float, random: np.random.Generator) -> Image.Image:
    """Add Gaussian noise of `sigma` levels of 255 to each pixel and colour."""
    pixels = np.asarray(image, np.float64)
    return _from_pixels(pixels + random.normal(0, sigma, pixels.shape))


def jpeg(image: Image.Image, quality: float, random: np.random.Generator) -> Image.Image:
    """Compress as a JPEG of Pillow's `quality`, in whole numbers."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=round(quality))
    return Image.open(file).convert("RGB")


def downscale(image: Image.Image, factor: float, random: np.random.Generator) -> Image.Image:
    """Shrink by `factor`, and enlarge to the old size, both by Lanczos' filter."""
    small = max(1, round(image.width / factor)), max(1, round(image.height / factor))
    return image.resize(small, Image.Resampling.LANCZOS).resize(image.size, Image.Resampling.LANCZOS)


def grey(image: Image.Image, share: float, random: np.random.Generator) -> Image.Image:
    """Remove a share of the colour; 1: the luma of ITU-R 601."""
    return ImageEnhance.Color(image).enhance(1 - share)


def fade(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    """Remove up to 70 % of the colour and 40 % of the contrast, and blend up to 35 % of yellowed paper over it."""
    pale = ImageEnhance.Color(image).enhance(1 - 0.7 * strength)
    pale = ImageEnhance.Contrast(pale).enhance(1 - 0.4 * strength)
    return Image.blend(pale, Image.new("RGB", image.size, PAPER), 0.35 * strength)


def dust(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    """Draw up to 6 scratches and 80 spots, in white, and as many in black."""
    for colour in ("white", "black"):
        marks, pen, unit = _layer(image.size)
        width, height = marks.size
        for _ in range(round(6 * strength)):
            steps = np.cumsum(random.normal(0, 4 * unit, 9)) + random.uniform(0, width)
            top, bottom = np.sort(random.uniform(-0.2, 1.2, 2)) * height
            path = list(zip(steps.tolist(), np.linspace(top, bottom, 9).tolist(), strict=True))
            pen.line(path, 255, max(1, round(random.uniform(0.7, 2) * unit)), "curve")
        for _ in range(round(80 * strength)):
            x, y, (a, b) = random.uniform(0, width), random.uniform(0, height), random.uniform(0.5, 3, 2) * unit
            pen.ellipse((x - a, y - b, x + a, y + b), 255)
        image = _painted(image, colour, marks)
    return image


def rain_haze(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    """Veil the image in haze, denser above, where it is far (Koschmieder: I = J t + A (1 - t)), and draw rain."""
    clear = 1 - strength * np.linspace(0.8, 0.3, image.height)[:, None, None]
    image = _from_pixels(np.asarray(image, np.float64) * clear + AIR * (1 - clear))
    marks, pen, unit = _layer(image.size)
    lean, (width, height) = random.uniform(-0.4, 0.4), marks.size
    for _ in range(round(300 * strength)):
        x, y, length = random.uniform(0, width), random.uniform(0, height), random.uniform(10, 35) * unit
        pen.line((x, y, x + lean * length, y + length), round(random.uniform(60, 150)), max(1, round(unit)))
    return _painted(image, "white", marks)


def hole(image: Image.Image, share: float, random: np.random.Generator) -> Image.Image:
    """Paint a region of `share` of the area in grey."""
    return _painted(image, GRAY, hole_mask(image.size, share, random))


def hole_mask(size: tuple[int, int], share: float, random: np.random.Generator) -> Image.Image:
    """Return a rectangle, an ellipse or strokes of a brush that cover `share` of the area, white on black."""
    (width, height), mask = size, Image.new("L", size)
    pen, kind = ImageDraw.Draw(mask), random.integers(3)
    if kind == 2:
        brush, point = max(2, round(0.1 * min(size))), random.uniform(0, 1, 2) * size
        while mask.histogram()[255] < share * width * height:
            end = np.clip(point + random.normal(0, 0.25, 2) * size, 0, size)
            # A quarter of the brush at a time, so that the last stroke ends at the share.
            for dab in np.linspace(point, end, 2 + int(4 * np.abs(end - point).max() / brush))[1:]:
                pen.line((*point, *dab), 255, brush)
                pen.circle(dab.tolist(), brush / 2, 255)
                point = dab
                if mask.histogram()[255] >= share * width * height:
                    break
        return mask
    is_ellipse = kind == 1 and share < np.pi / 4
    area, ratio = share * (4 / np.pi if is_ellipse else 1), np.exp(random.uniform(-0.7, 0.7))
    across = min(1.0, max(area, np.sqrt(area * ratio)))
    box = width * across, height * min(1.0, area / across)
    left, top = (random.uniform(0, whole - part) for whole, part in zip(size, box, strict=True))
    corners = left, top, left + max(0, box[0] - 1), top + max(0, box[1] - 1)
    (pen.ellipse if is_ellipse else pen.rectangle)(corners, 255)
    return mask


def middle(size: tuple[int, int], share: float, random: np.random.Generator) -> tuple[int, int]:
    """Return the size of the middle without `share` of the area, in steps of 16: less wide, less high, or both."""
    kept = ((1 - share, 1), (1, 1 - share), ((1 - share) ** 0.5,) * 2)[random.integers(3)]
    width, height = (
        side if part == 1 else max(16, min(side - 16, round(side * part / 16) * 16))
        for side, part in zip(size, kept, strict=True)
    )
    return width, height


def text(image: Image.Image, height: float, random: np.random.Generator) -> Image.Image:
    """Write words over the image in a font of matplotlib: tiled and turned as a watermark, or once with an outline.

    Args:
        height: height of the letters as a share of the shorter side.
    """
    size, fonts = max(6, round(height * min(image.size))), _fonts()
    words, font = random.choice(WORDS), ImageFont.truetype(random.choice(fonts), size)
    if random.random() < 0.5:
        place = random.uniform(0.2, 0.8) * image.width, random.uniform(0.1, 0.9) * image.height
        for colour, stroke in (("black", size / 15), ("white", 0)):
            marks = Image.new("L", image.size)
            ImageDraw.Draw(marks).text(place, words, 255, font, anchor="mm", stroke_width=stroke)
            image = _painted(image, colour, marks)
        return image
    reach, (_, _, wide, high) = round(np.hypot(*image.size)), font.getbbox(words)
    marks = Image.new("L", (reach, reach))
    for row, y in enumerate(range(0, reach, round(4 * high))):
        for x in range(round(-wide * (row % 2)), reach, round(1.6 * wide)):
            ImageDraw.Draw(marks).text((x, y), words, round(255 * random.uniform(0.3, 0.6)), font)
    marks = marks.rotate(random.uniform(15, 45), Image.Resampling.BICUBIC)
    left, top = (reach - image.width) // 2, (reach - image.height) // 2
    return _painted(image, "white", marks.crop((left, top, left + image.width, top + image.height)))


# Outlines.


def canny_edges(image: Image.Image, sigma: float, random: np.random.Generator) -> Image.Image:
    """Return scikit-image's Canny edges after a Gaussian of `sigma` pixels, white on black."""
    from skimage.color import rgb2gray
    from skimage.feature import canny

    return Image.fromarray(canny(rgb2gray(np.asarray(image)), sigma)).convert("RGB")


def lines(image: Image.Image, sigma: float, random: np.random.Generator) -> Image.Image:
    """Divide the brightness by its Gaussian blur of `sigma` pixels, each plus 16 levels: a drawing, dark on white."""
    bright = ImageOps.grayscale(image)
    blurred = bright.filter(ImageFilter.GaussianBlur(sigma))
    return _from_pixels(255 * (np.asarray(bright) + 16.0) / (np.asarray(blurred) + 16.0)).convert("RGB")


def _from_pixels(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(pixels).clip(0, 255).astype(np.uint8))


def _layer(size: tuple[int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw, float]:
    """Return a black layer, enlarged for smooth edges; its pen; and the length of a pixel in an image of 512x512."""
    marks = Image.new("L", (size[0] * SMOOTH, size[1] * SMOOTH))
    return marks, ImageDraw.Draw(marks), SMOOTH * (size[0] * size[1]) ** 0.5 / UNIT


def _painted(image: Image.Image, colour: str | tuple[int, int, int], where: Image.Image) -> Image.Image:
    """Return the image with a colour painted where the mask of any size is white."""
    where = where if where.size == image.size else where.resize(image.size, Image.Resampling.BOX)
    return Image.composite(Image.new("RGB", image.size, colour), image, where)


@lru_cache(1)
def _fonts() -> list[str]:
    import matplotlib

    return sorted(map(str, (Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("DejaVuS*[!y].ttf")))


# Settings.

Draw = Callable[[Image.Image, Any, np.random.Generator], Image.Image]


class Recipe(NamedTuple):
    """A way to make a condition image.

    Attributes:
        draw: the function, which is given a strength; None for `border`, which is a part of the image.
        usual: least and most strength; or the name of a model of transformers.
        bounds: the strengths that are allowed.
        prompts: instructions from the condition image to the target, with ` | ` in between.
    """

    draw: Draw | None
    usual: tuple[float, float] | str
    bounds: tuple[float, float]
    prompts: str


RECIPES = {
    "blur": Recipe(blur, (1, 4), (0, 100), "sharpen this image | remove the blur | make this photo sharp"),
    "noise": Recipe(noise, (5, 50), (0, 255), "remove the noise | denoise this image | make this photo clean"),
    "jpeg": Recipe(jpeg, (5, 40), (1, 95), "remove the compression artifacts | repair the JPEG compression"),
    "downscale": Recipe(downscale, (2, 6), (1, 64), "increase the resolution | add the missing detail"),
    "grey": Recipe(grey, (1, 1), (0, 1), "colorize this photo | add natural colors | make this photo colorful"),
    "fade": Recipe(fade, (0.4, 1), (0, 1), "restore the faded colors | restore this old photo | remove the yellowing"),
    "dust": Recipe(dust, (0.2, 1), (0, 1), "remove the scratches and dust | repair this scanned photo"),
    "rain_haze": Recipe(rain_haze, (0.3, 1), (0, 1), "remove the rain and haze | make the weather clear"),
    "hole": Recipe(hole, (0.05, 0.3), (0.001, 0.9), "fill in the gray area | complete the missing part"),
    "border": Recipe(None, (0.2, 0.5), (0.001, 0.9), "extend the image | continue the image beyond its edges"),
    "text": Recipe(text, (0.05, 0.12), (0.01, 0.5), "remove the text | remove the watermark | erase the letters"),
    "edges": Recipe(canny_edges, (1, 2), (0.1, 20), "turn these edges into a photo | make a photo from this outline"),
    "lines": Recipe(lines, (2, 5), (0.5, 100), "turn this drawing into a photo | make a photo from this sketch"),
    "depth": Recipe(depth, DEPTH, (0, 0), "turn this depth map into a photo | make a photo with this depth"),
    "pose": Recipe(pose, POSE, (0, 0), "turn this pose into a photo | make a photo of people in this pose"),
}
# Instructions for a chain of recipes.
RESTORE = "restore this photo | repair the damage | make this photo look good again"


class Step(NamedTuple):
    """A recipe of a chain, with the range of its strength, or with its model."""

    name: str
    usual: tuple[float, float] | str

    def __str__(self) -> str:
        if isinstance(self.usual, str):
            return f"{self.name} ({self.usual})"
        return f"{self.name} {' to '.join(f'{one:g}' for one in dict.fromkeys(self.usual))}"

    def strength(self, random: np.random.Generator) -> Any:
        """Draw the strength; return the model's name if the recipe has a model."""
        return self.usual if isinstance(self.usual, str) else random.uniform(*self.usual)


@dataclass(frozen=True)
class Chain:
    """The setting data.control of a root.

    Attributes:
        steps: recipes, in order.
        shuffle: draw their order.
        variants: number of condition images for each view of a target.
        prompts: instructions instead of the recipe's; [caption] stands for the image's caption.
        mask: weight the loss by the holes.
    """

    steps: tuple[Step, ...]
    shuffle: bool
    variants: int
    prompts: tuple[str, ...]
    mask: bool

    def has(self, name: str) -> bool:
        return any(step.name == name for step in self.steps)

    @property
    def models(self) -> list[str]:
        """Names of the models of transformers that it runs."""
        named = [step.usual for step in self.steps if isinstance(step.usual, str)]
        return named + [PEOPLE] * self.has("pose")

    @property
    def identity(self) -> str:
        """Text that changes with the recipes, their strengths and their models' weights; UserError without a model."""
        return " ".join([str(self), *map(identity, self.models)])

    def __str__(self) -> str:
        """Return its recipes with their strengths: `blur 1 to 4, jpeg 20`."""
        return ", ".join(map(str, self.steps)) + (" in any order" if self.shuffle else "")


def as_texts(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(map(str, given or ()))


def as_chain(place: str, recipe: Any, shuffle: bool, variants: int, prompts: Any, mask: bool) -> Chain | None:
    """Return the setting of a root; None without a recipe.

    Args:
        place: the setting in messages.
        recipe: a name, a mapping of names to strengths, or a list of these. The others: see `Chain`.

    Raises:
        UserError: a recipe is unknown, or a strength is out of its range.
    """
    entries = recipe if isinstance(recipe, list | tuple) else [recipe] if recipe else []
    pairs = [one for entry in entries for one in (entry.items() if isinstance(entry, Mapping) else [(entry, None)])]
    chain = Chain(tuple(_as_step(place, *pair) for pair in pairs), shuffle, variants, as_texts(prompts), mask)
    if CAPTION_PLACE[1:-1] in chain.prompts:
        raise UserError(f'{place}.prompts=[caption]: this is a list of one word. Write ["[caption]"].')
    if chain.has("edges") and find_spec("skimage") is None:
        raise UserError(f"{place}=edges needs scikit-image. Run pip install scikit-image.")
    if sum(step.name == "border" for step in chain.steps) > 1:
        raise UserError(f"{place}={recipe}: border can only be once in a chain")
    if mask and chain.steps and (not chain.has("hole") or chain.has("border")):
        raise UserError(f"{place}.mask=true needs the recipe hole, whose mask weights the loss, without border")
    return chain if chain.steps else None


def _as_step(place: str, name: Any, value: Any) -> Step:
    if not isinstance(name, str) or name not in RECIPES:
        plain = re.sub(r"\W+", "_", str(name).lower())
        near = [OTHER_NAMES[plain]] if plain in OTHER_NAMES else difflib.get_close_matches(plain, RECIPES, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Choose {', '.join(RECIPES)}."
        raise UserError(f"{place}={name}: there is no such recipe. {hint}")
    recipe = RECIPES[name]
    if value is None:
        return Step(name, recipe.usual)
    if isinstance(recipe.usual, str):
        if not isinstance(value, str) or not value:
            raise UserError(f"{place}: {name}={value}: must be a model of transformers, as {recipe.usual}")
        return Step(name, os.path.expanduser(value))
    ends, (least, most) = list(value) if isinstance(value, list | tuple) else [value, value], recipe.bounds
    is_number = [type(one) in (int, float) and least <= one <= most for one in ends]
    if len(ends) != 2 or not all(is_number) or ends[0] > ends[1]:
        raise UserError(f"{place}: {name}={value}: must be a number from {least:g} to {most:g}, or a range [LOW,HIGH]")
    return Step(name, (float(ends[0]), float(ends[1])))


def instructions(chain: Chain, captions: Sequence[str]) -> tuple[str, ...]:
    """Return the instructions of a sample: the configured ones, else its captions, else those of the recipe.

    Returns () if the configured ones contain a caption, and it has none.
    """
    captions = tuple(filter(None, captions))
    if not chain.prompts:
        name = "border" if chain.has("border") else chain.steps[0].name
        usual = RECIPES[name].prompts if len(chain.steps) == 1 or name == "border" else RESTORE
        return captions or tuple(usual.split(" | "))
    found = [one.replace(CAPTION_PLACE, caption) for one in chain.prompts for caption in captions or (CAPTION_PLACE,)]
    return () if any(CAPTION_PLACE in one for one in found) else tuple(dict.fromkeys(found))
