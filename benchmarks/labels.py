"""Images of docs/: names of their rows and columns, and small files."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

# Smallest height of a letter in pixels; wider images get larger ones, for pages shrink them.
SMALLEST, SHARE = 18, 1 / 60
# Widest label of a row, and the space around each label, in letters.
WIDEST, MARGIN = 10, 0.5


def labelled(image: Image.Image, headers: Sequence[str], labels: Sequence[str]) -> Image.Image:
    """Write headers above the equal columns of an image, and labels to the left of its equal rows.

    A header may span several columns, and a label several rows: only their number divides the image.
    """
    size = max(SMALLEST, round(image.width * SHARE))
    font, margin = ImageFont.load_default(size), round(size * MARGIN)
    labels = [wrapped(label, font, size * WIDEST) for label in labels]
    headers = [wrapped(header, font, image.width / len(headers) - margin) for header in headers]
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    left, above = (
        max((round(pen.multiline_textbbox((0, 0), text, font)[side]) + 2 * margin for text in texts), default=0)
        for side, texts in ((2, labels), (3, headers))
    )
    page = Image.new("RGB", (left + image.width, above + image.height), "white")
    page.paste(image.convert("RGB"), (left, above))
    pen = ImageDraw.Draw(page)
    for index, header in enumerate(headers):
        middle = left + (index + 0.5) * image.width / len(headers)
        pen.multiline_text((middle, above - margin), header, "black", font, anchor="md", align="center")
    for index, label in enumerate(labels):
        middle = above + (index + 0.5) * image.height / len(labels)
        pen.multiline_text((left - margin, middle), label, "black", font, anchor="rm", align="right")
    return page


def stacked(rows: Sequence[Image.Image]) -> Image.Image:
    """Return images of any width below each other, on white."""
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "white")
    for index, row in enumerate(rows):
        sheet.paste(row, (0, sum(above.height for above in rows[:index])))
    return sheet


def wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: float) -> str:
    """Break a text, without its backticks, into lines of at most a width in pixels, unless a word is wider."""
    lines: list[str] = []
    for word in text.replace("`", "").split():
        longer = f"{lines[-1]} {word}" if lines else word
        lines[-1:] = [longer] if font.getlength(longer) <= width else [*lines[-1:], word]
    return "\n".join(lines)


def save_small(image: Image.Image, path: Path) -> None:
    """Write an image as WebP, half as large as a PNG of 256 colours."""
    image.convert("RGB").save(path, quality=80, method=6)
