"""Draw docs/pairs.webp: a good pair for training, and bad ones; and docs/controls.webp: what data.control makes.

    python benchmarks/pairs.py

The photographs are those of assets/sunset, and scikit-image's: Eileen Collins, by NASA, in the public domain; a cat and
a cup of coffee, in CC0.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "assets")]

from photos_sunset import with_sunset  # noqa: E402

from benchmarks.labels import labelled, save_small, stacked, wrapped  # noqa: E402
from benchmarks.photos.pairs import MAKE_IT_SUNSET, photographs  # noqa: E402
from datamodules.images.recipes import RECIPES, middle  # noqa: E402

SIDE, GAP, SIZE = 170, 6, 21
FRAME, SHIFTED, ZOOMED = (0, 20, 220, 240), (28, 36, 248, 256), (30, 90, 180, 240)


def pairs() -> dict[str, tuple[Image.Image, Image.Image, str]]:
    """Return control, target and instruction by the name of each kind."""
    [whole] = [control for name, control, _ in photographs("held_out") if name == "fields3"]
    control, shifted, zoomed = (whole.crop(box).resize((SIDE, SIDE)) for box in (FRAME, SHIFTED, ZOOMED))
    target = with_sunset(control)
    return {
        "good": (control, target, MAKE_IT_SUNSET),
        "bad: shifted": (control, with_sunset(shifted), MAKE_IT_SUNSET),
        "bad: other crop": (control, with_sunset(zoomed), MAKE_IT_SUNSET),
        "bad: other light": (control, ImageEnhance.Brightness(target).enhance(0.5), MAKE_IT_SUNSET),
        "bad: identical": (control, control, MAKE_IT_SUNSET),
        "bad: swapped": (target, control, MAKE_IT_SUNSET),
        "bad: describes the image": (control, target, "rice fields below a mountain at sunset"),
    }


def image() -> Image.Image:
    """Return the pairs as columns: control, target, instruction."""
    kinds, side = pairs(), SIDE + GAP
    sheet = Image.new("RGB", (len(kinds) * side, 3 * side), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(SIZE)
    for column, (control, target, instruction) in enumerate(kinds.values()):
        left = column * side + GAP // 2
        sheet.paste(control, (left, GAP // 2))
        sheet.paste(target, (left, side + GAP // 2))
        centre = left + SIDE / 2, 2.5 * side
        pen.multiline_text(centre, wrapped(instruction, font, SIDE), "black", font, anchor="mm", align="center")
    return labelled(sheet, list(kinds), ("control", "target", "instruction"))


# The photograph of each recipe, and its strength here. The models of depth and pose are not on every machine.
MADE = {
    "blur": ("astronaut", 3),
    "noise": ("coffee", 45),
    "jpeg": ("astronaut", 6),
    "downscale": ("chelsea", 6),
    "grey": ("coffee", 1),
    "fade": ("astronaut", 0.8),
    "dust": ("chelsea", 0.8),
    "rain_haze": ("coffee", 0.8),
    "hole": ("astronaut", 0.15),
    "border": ("chelsea", 0.5),
    "text": ("coffee", 0.1),
    "edges": ("astronaut", 1),
    "lines": ("chelsea", 3),
}
COLUMNS = 5


def controls() -> Image.Image:
    """Return the control and the target of each recipe, side by side, in rows of pairs."""
    import skimage.data

    size, names, bands = (SIDE, SIDE), list(MADE), []
    for first in range(0, len(names), COLUMNS):
        band = Image.new("RGB", (COLUMNS * (2 * SIDE + GAP), SIDE + GAP), "white")
        for place, name in enumerate(names[first : first + COLUMNS]):
            subject, strength = MADE[name]
            photo = ImageOps.fit(Image.fromarray(getattr(skimage.data, subject)()), size, Image.Resampling.LANCZOS)
            random, left = np.random.default_rng(list(name.encode())), place * (2 * SIDE + GAP)
            if (draw := RECIPES[name].draw) is None:
                width, height = middle(size, strength, random)
                corner = (SIDE - width) // 2, (SIDE - height) // 2
                control = photo.crop((*corner, corner[0] + width, corner[1] + height))
            else:
                control = draw(photo, strength, random)
            band.paste(control, (left + (SIDE - control.width) // 2, (SIDE - control.height) // 2))
            band.paste(photo, (left + SIDE, 0))
        labels = [f"{name} {MADE[name][1]}" for name in names[first : first + COLUMNS]]
        bands.append(labelled(band, labels + [""] * (COLUMNS - len(labels)), ()))
    return stacked(bands)


if __name__ == "__main__":
    save_small(image(), ROOT / "docs" / "pairs.webp")
    save_small(controls(), ROOT / "docs" / "controls.webp")
