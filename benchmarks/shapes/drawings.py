"""Scenes of coloured shapes on a plain ground, which Shapes makes from captions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

SIDE = 64
SHAPE_COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 220, 60),
    "orange": (245, 140, 30),
    "purple": (140, 50, 180),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
SHAPE_KINDS = ("circle", "square", "triangle", "star")
# Images are drawn at this multiple of their size and scaled down, for smooth edges.
OVERSAMPLING = 4


@dataclass(frozen=True)
class Shape:
    """A shape around (x, y), in pixels."""

    kind: str
    color: str
    x: int
    y: int
    radius: int


@dataclass(frozen=True)
class Scene:
    """The content of an image."""

    background: str
    shapes: tuple[Shape, ...]


def draw(scene: Scene) -> Image.Image:
    """Draw a scene."""
    size = SIDE * OVERSAMPLING
    image = Image.new("RGB", (size, size), SHAPE_COLORS[scene.background])
    canvas = ImageDraw.Draw(image)
    for shape in scene.shapes:
        canvas.polygon(list(_corners(shape)), fill=SHAPE_COLORS[shape.color])
    return image.reduce(OVERSAMPLING)


def _corners(shape: Shape) -> Iterator[tuple[float, float]]:
    """Yield the polygon in oversampled pixels. A star's inner corners are at half the radius."""
    count, first = {"circle": (60, 0.0), "square": (4, 45.0), "triangle": (3, -90.0), "star": (10, -90.0)}[shape.kind]
    for corner in range(count):
        radius = shape.radius * (0.5 if shape.kind == "star" and corner % 2 else 1.0)
        angle = math.radians(first + 360 * corner / count)
        yield (
            OVERSAMPLING * (shape.x + radius * math.cos(angle)),
            OVERSAMPLING * (shape.y + radius * math.sin(angle)),
        )


def corner(shape: Shape) -> str:
    """Return the corner of the image that the shape is nearest to, as `top left`; empty near the middle lines."""
    x, y = shape.x - SIDE // 2, shape.y - SIDE // 2
    if min(abs(x), abs(y)) < 5:
        return ""
    return f"{'top' if y < 0 else 'bottom'} {'left' if x < 0 else 'right'}"
