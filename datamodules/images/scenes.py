"""A small drawn world: one to three coloured shapes of different kinds on a plain ground."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random

from PIL import Image, ImageDraw

SIDE = 64
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 220, 60),
    "orange": (245, 140, 30),
    "purple": (140, 50, 180),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
KINDS = ("circle", "square", "triangle", "star")
# Pictures are drawn at this multiple of their size and scaled down, for smooth edges.
OVERSAMPLING = 4


@dataclass(frozen=True)
class Shape:
    """A shape around (x, y), in pixels."""

    kind: str
    color: str
    x: int
    y: int
    radius: int

    def inside(self) -> bool:
        """Whether the whole shape is in the picture."""
        return all(self.radius < place < SIDE - self.radius for place in (self.x, self.y))

    def clear_of(self, other: "Shape") -> bool:
        """Whether the two do not touch."""
        return math.hypot(self.x - other.x, self.y - other.y) > self.radius + other.radius + 1


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    background: str
    shapes: tuple[Shape, ...]

    def changed(self, old: Shape, *new: Shape) -> "Scene":
        """The scene with `new` in place of `old`, or without `old` if there is no new one."""
        at = self.shapes.index(old)
        return replace(self, shapes=(*self.shapes[:at], *new, *self.shapes[at + 1 :]))


def random_scene(random: Random) -> Scene:
    """One to three shapes of different kinds that do not touch, none in the colour of the ground."""
    background = random.choice(list(COLORS))
    colors = [color for color in COLORS if color != background]
    kinds = random.sample(KINDS, random.randint(1, 3))
    while True:
        shapes = tuple(_random_shape(random, kind, random.choice(colors)) for kind in kinds)
        if all(one.clear_of(other) for one, other in combinations(shapes, 2)):
            return Scene(background, shapes)


def _random_shape(random: Random, kind: str, color: str) -> Shape:
    radius = random.randint(9, 12)
    x, y = (random.randint(radius + 1, SIDE - radius - 1) for _ in range(2))
    return Shape(kind, color, x, y, radius)


def draw(scene: Scene, outlines: bool = False) -> Image.Image:
    """The scene as a picture; with `outlines`, only the outlines of its shapes."""
    size = SIDE * OVERSAMPLING
    image = Image.new("RGB", (size, size), COLORS[scene.background])
    canvas = ImageDraw.Draw(image)
    for shape in scene.shapes:
        canvas.polygon(list(_corners(shape)), fill=COLORS[shape.color])
        if outlines:
            canvas.polygon(list(_corners(replace(shape, radius=shape.radius - 3))), fill=COLORS[scene.background])
    return image.reduce(OVERSAMPLING)


def _corners(shape: Shape) -> Iterator[tuple[float, float]]:
    """The polygon in oversampled pixels. A star's inner corners are at half the radius."""
    count, first = {"circle": (60, 0.0), "square": (4, 45.0), "triangle": (3, -90.0), "star": (10, -90.0)}[shape.kind]
    for corner in range(count):
        radius = shape.radius * (0.5 if shape.kind == "star" and corner % 2 else 1.0)
        angle = math.radians(first + 360 * corner / count)
        yield (
            OVERSAMPLING * (shape.x + radius * math.cos(angle)),
            OVERSAMPLING * (shape.y + radius * math.sin(angle)),
        )
