"""Scenes of coloured shapes on a plain ground, and edits with a known exact result, which Shapes was trained on.

Images and instructions are a function of a seed.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random
from typing import NamedTuple

from PIL import Image, ImageChops, ImageDraw, ImageOps

from datamodules.images.tables import TABLES

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

    def clear_of(self, other: "Shape") -> bool:
        """Return whether the two do not touch."""
        return math.hypot(self.x - other.x, self.y - other.y) > self.radius + other.radius + 1


@dataclass(frozen=True)
class Scene:
    """The content of an image."""

    background: str
    shapes: tuple[Shape, ...]

    def changed(self, old: Shape, *new: Shape) -> "Scene":
        """Return the scene with `new` in place of `old`."""
        at = self.shapes.index(old)
        return replace(self, shapes=(*self.shapes[:at], *new, *self.shapes[at + 1 :]))


def random_scene(random: Random) -> Scene:
    """Return one to three shapes of different kinds that do not touch, none in the colour of the ground."""
    background = random.choice(list(SHAPE_COLORS))
    colors = [color for color in SHAPE_COLORS if color != background]
    kinds = random.sample(SHAPE_KINDS, random.randint(1, 3))
    while True:
        shapes = tuple(_random_shape(random, kind, random.choice(colors)) for kind in kinds)
        if all(one.clear_of(other) for one, other in combinations(shapes, 2)):
            return Scene(background, shapes)


def _random_shape(random: Random, kind: str, color: str) -> Shape:
    radius = random.randint(9, 12)
    x, y = (random.randint(radius + 1, SIDE - radius - 1) for _ in range(2))
    return Shape(kind, color, x, y, radius)


def draw(scene: Scene, outlines: bool = False) -> Image.Image:
    """Draw a scene; with `outlines`, only the outlines of its shapes."""
    size = SIDE * OVERSAMPLING
    image = Image.new("RGB", (size, size), SHAPE_COLORS[scene.background])
    canvas = ImageDraw.Draw(image)
    for shape in scene.shapes:
        canvas.polygon(list(_corners(shape)), fill=SHAPE_COLORS[shape.color])
        if outlines:
            canvas.polygon(list(_corners(replace(shape, radius=shape.radius - 3))), fill=SHAPE_COLORS[scene.background])
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


# Pixels by which "move" moves, right and down.
DIRECTIONS = {"left": (-16, 0), "right": (16, 0), "up": (0, -16), "down": (0, 16)}


class Edit(NamedTuple):
    """An instruction, its result, the instruction that undoes it if possible, and whether it needs the scene."""

    prompt: str
    result: Image.Image
    back: str | None = None
    has_control: bool = True


# Edits, each of a scene and one of its shapes; None if the edit is not possible.


def recolor(random: Random, scene: Scene, shape: Shape) -> Edit:
    """Give the shape another colour, not the background's."""
    color = random.choice([color for color in SHAPE_COLORS if color not in (shape.color, scene.background)])
    result = draw(scene.changed(shape, replace(shape, color=color)))
    return Edit(f"make the {shape.kind} {color}", result, f"make the {shape.kind} {shape.color}")


def remove(random: Random, scene: Scene, shape: Shape) -> Edit:
    return Edit(f"remove the {shape.kind}", draw(scene.changed(shape)))


def move(random: Random, scene: Scene, shape: Shape) -> Edit | None:
    """Move the shape by 16 pixels, if there is room."""
    name, (dx, dy) = random.choice(list(DIRECTIONS.items()))
    moved = replace(shape, x=shape.x + dx, y=shape.y + dy)
    inside = all(shape.radius < place < SIDE - shape.radius for place in (moved.x, moved.y))
    if not inside or any(not moved.clear_of(other) for other in scene.shapes if other is not shape):
        return None
    back = next(other for other, step in DIRECTIONS.items() if step == (-dx, -dy))
    return Edit(f"move the {shape.kind} {name}", draw(scene.changed(shape, moved)), f"move the {shape.kind} {back}")


def background(random: Random, scene: Scene, shape: Shape) -> Edit:
    """Give the background another colour, no shape's."""
    taken = {scene.background, *(one.color for one in scene.shapes)}
    color = random.choice([color for color in SHAPE_COLORS if color not in taken])
    result = draw(replace(scene, background=color))
    return Edit(f"make the background {color}", result, f"make the background {scene.background}")


def turn(random: Random, scene: Scene, shape: Shape) -> Edit:
    kind = random.choice([kind for kind in SHAPE_KINDS if kind not in [one.kind for one in scene.shapes]])
    result = draw(scene.changed(shape, replace(shape, kind=kind)))
    return Edit(f"turn the {shape.kind} into a {kind}", result, f"turn the {kind} into a {shape.kind}")


def describe(random: Random, scene: Scene, shape: Shape) -> Edit:
    """Draw the scene from its caption alone, which names the corner of some shapes if there are at most two."""
    phrases = []
    for one in scene.shapes:
        place = corner(one) if len(scene.shapes) < 3 and random.random() < 0.5 else ""
        phrases.append(f"a {one.color} {one.kind}{place and ' '}{place}")
    return Edit(f"{' and '.join(phrases)} on {scene.background}", draw(scene), has_control=False)


def corner(shape: Shape) -> str:
    """Return the corner of the image that the shape is nearest to, as `top left`; empty near the middle lines."""
    x, y = shape.x - SIDE // 2, shape.y - SIDE // 2
    if min(abs(x), abs(y)) < 5:
        return ""
    return f"{'top' if y < 0 else 'bottom'} {'left' if x < 0 else 'right'}"


def segment(random: Random, scene: Scene, shape: Shape) -> Edit:
    white = tuple(replace(one, color="white") for one in scene.shapes)
    return Edit("segment the shapes", draw(Scene("black", white)).point(lambda value: 255 * (value - 25) / 220))


def outline(random: Random, scene: Scene, shape: Shape) -> Edit:
    """Draw the shapes' outlines on the same background."""
    return Edit("outline the shapes", draw(scene, outlines=True))


def mirror(random: Random, scene: Scene, shape: Shape) -> Edit:
    return Edit("mirror the picture", ImageOps.mirror(draw(scene)))


def invert(random: Random, scene: Scene, shape: Shape) -> Edit:
    return Edit("invert the colors", ImageChops.invert(draw(scene)))


# Edits that the embedded model was trained on, and edits that it has never seen.
KNOWN_EDITS = (recolor, remove, move, background, turn, describe)
HELD_BACK = (segment, outline, mirror, invert)
EDITS: dict[str, Callable[[Random, Scene, Shape], Edit | None]] = {
    edit.__name__: edit for edit in KNOWN_EDITS + HELD_BACK
}


def write_pairs(folder: Path, edits: Sequence[str], count: int, seed: int) -> None:
    """Draw `count` pairs, with the table that lists them."""
    random = Random(seed)
    rows: list[dict[str, str | None]] = []
    number = 0
    while len(rows) < count:
        name = edits[number % len(edits)]
        scene = random_scene(random)
        edit = EDITS[name](random, scene, random.choice(scene.shapes))
        if edit is None:
            continue
        before, after = f"{number:05d}.png" if edit.has_control else None, f"{number:05d}-{name}.png"
        edit.result.save(folder / after)
        if before is not None:
            draw(scene).save(folder / before)
        rows.append({"file_name": after, "control_file_name": before, "prompt": edit.prompt})
        if edit.back is not None:
            rows.append({"file_name": before, "control_file_name": after, "prompt": edit.back})
        number += 1
    (folder / TABLES[0]).write_text("".join(json.dumps(row) + "\n" for row in rows[:count]), encoding="utf-8")
