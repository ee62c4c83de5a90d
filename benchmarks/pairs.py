"""Draw docs/pairs.png: a good pair for training, and bad ones.

    python benchmarks/pairs.py

The photograph is scikit-image's astronaut: Eileen Collins, by NASA, in the public domain.
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.labels import labelled, save_small, wrapped  # noqa: E402
from benchmarks.shapes.photographs import edited  # noqa: E402

SIDE, GAP, SIZE = 170, 6, 21
INSTRUCTION = "make it snow"
FRAME, SHIFTED, ZOOMED = (40, 10, 430, 400), (90, 45, 480, 435), (90, 20, 370, 300)


def pairs() -> dict[str, tuple[Image.Image, Image.Image, str]]:
    """Return control, target and instruction by the name of each kind."""
    import skimage.data

    whole = Image.fromarray(skimage.data.astronaut())
    control, shifted, zoomed = (whole.crop(box).resize((SIDE, SIDE)) for box in (FRAME, SHIFTED, ZOOMED))
    target = edited("snow", control)
    return {
        "good": (control, target, INSTRUCTION),
        "bad: shifted": (control, edited("snow", shifted), INSTRUCTION),
        "bad: other crop": (control, edited("snow", zoomed), INSTRUCTION),
        "bad: other light": (control, edited("snow", edited("night", control)), INSTRUCTION),
        "bad: identical": (control, control, INSTRUCTION),
        "bad: swapped": (target, control, INSTRUCTION),
        "bad: describes the image": (control, target, "an astronaut in an orange suit, snowflakes"),
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
        middle = left + SIDE / 2, 2.5 * side
        pen.multiline_text(middle, wrapped(instruction, font, SIDE), "black", font, anchor="mm", align="center")
    return labelled(sheet, list(kinds), ("control", "target", "instruction"))


if __name__ == "__main__":
    save_small(image(), ROOT / "docs" / "pairs.png")
