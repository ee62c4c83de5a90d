"""Sections on T-LoRA's claim: a new subject from one image, drawn without its background and its place.

The subject, `sks purple square`, is a cross of two colours, a shape and a pattern that the base has never drawn. The
training image shows it at the top left on blue. Other prompts ask for other grounds, corners and companions; each
answer is exact.
"""

import functools
import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.photos.pairs import write_lines
from benchmarks.photos.runs import LOADING, WORK, Figures, Section, grid, parts, train
from benchmarks.shapes.base import GUIDANCE, Template, find_shape, located, make, near, pipeline, template
from benchmarks.shapes.drawings import OVERSAMPLING, SHAPE_COLORS, SIDE, Scene, Shape, corner, draw
from foundation.settings import ASSETS

SUBJECT = "sks purple square"
PATTERN = ("purple", "yellow")  # left top and right bottom, and the other two quarters
RADIUS, ARM = 13, 5
GROUND, PLACE = "blue", (20, 20)
GROUNDS = ("red", "green", "orange", "white", "black")
CORNERS = {"top left": (20, 20), "top right": (44, 20), "bottom left": (20, 44), "bottom right": (44, 44)}
COMPANIONS = ("circle", "triangle", "star")
# Mask IoU of something in the subject's colours that has a place.
SHOWN = 0.3
CHOICE, TEST = 12, 24  # prompts that choose learning rate and step, and prompts that are reported
STEPS, EVERY = 200, 50
RATES = ("5e-4", "1.5e-3", "5e-3", "1.5e-2", "5e-2")
SEEDS = (1, 2, 3, 4, 5)
RANKS = (4, 16, 64)
MOST_ORTHOGONAL = 32  # singular values of Shapes' narrowest layer
SHAPES = ASSETS / "shapes"
COMMON = (
    "model.pretrained_model_name_or_path=assets/shapes",
    "model.resolution=64",
    "model.dtype=float32",
    "adapter.target_modules=all-linear",
    "data=captions",
    "data.root=WORK/subject/train.jsonl",
    "data.val_root=WORK/subject/prompts.jsonl",
    "data.batch_size=4",
    f"trainer.max_steps={STEPS}",
    f"sample_every={EVERY}",
    f"save_every={EVERY}",
    f"model.sampling.true_cfg_scale={GUIDANCE}",
    'model.sampling.negative_prompt=""',
    "scheduler=constant",  # so that each step is the end of a run of its own
    "model.recipe.init_lora_weights=gaussian",  # as T-LoRA's
    "~callbacks.validation",
    f"callbacks.sample_images.count={CHOICE + TEST}",
)


class Asked(NamedTuple):
    """The content of a prompt."""

    ground: str
    place: str | None = None
    companion: Shape | None = None

    @property
    def prompt(self) -> str:
        """The prompt, in the words of the base's captions."""
        shapes = [f"a {SUBJECT} {self.place or ''}".strip()]
        shapes += [f"a {self.companion.color} {self.companion.kind}"] if self.companion else []
        return f"{' and '.join(shapes)} on {self.ground}"


def draw_subject(ground: str, center: tuple[int, int], companion: Shape | None = None) -> Image.Image:
    """Draw the subject around a point in pixels."""
    scene = Scene(ground, (companion,) if companion else ())
    image = draw(scene).resize((SIDE * OVERSAMPLING,) * 2, Image.Resampling.NEAREST)
    canvas = ImageDraw.Draw(image)
    x, y = center
    for left, top, color in ((-1, -1, 0), (1, 1, 0), (1, -1, 1), (-1, 1, 1)):
        for wide, high in ((RADIUS, ARM), (ARM, RADIUS)):
            # Pillow's rectangles contain their last row and column.
            (x0, x1), (y0, y1) = (sorted((one, one + far)) for one, far in ((x, left * wide), (y, top * high)))
            box = (OVERSAMPLING * x0, OVERSAMPLING * y0, OVERSAMPLING * x1 - 1, OVERSAMPLING * y1 - 1)
            canvas.rectangle(box, fill=SHAPE_COLORS[PATTERN[color]])
    return image.reduce(OVERSAMPLING)


@functools.cache
def asked() -> list[Asked]:
    """Return the prompts: those that choose, then those that are reported; two thirds name a corner, or a companion."""
    random = Random(17)
    found: list[Asked] = []
    for number in range(CHOICE + TEST):
        ground = random.choice(GROUNDS)
        color = random.choice([color for color in GROUNDS if color != ground])
        place = random.choice(list(CORNERS)[1:]) if number % 3 else None
        companion = Shape(random.choice(COMPANIONS), color, 20, 20, 10) if number % 3 != 1 else None
        found.append(Asked(ground, place, companion))
    return found


def answer(one: Asked) -> Image.Image:
    """Draw an image that answers a prompt."""
    return draw_subject(one.ground, CORNERS[one.place or "bottom right"], one.companion)


def write_data() -> None:
    """Draw the training image, with a caption that names its place or not, and an answer to each prompt."""
    folder = WORK / "subject"
    folder.mkdir(parents=True, exist_ok=True)
    draw_subject(GROUND, PLACE).save(folder / "subject.png")
    for name, place in (("train", None), ("placed", "top left")):
        row = {"file_name": "subject.png", "prompt": Asked(GROUND, place).prompt}
        write_lines(folder / f"{name}.jsonl", [json.dumps(row)] * 24)
    lines = []
    for index, one in enumerate(asked()):
        answer(one).save(folder / f"{index:02d}.png")
        lines.append(json.dumps({"file_name": f"{index:02d}.png", "prompt": one.prompt}))
    write_lines(folder / "prompts.jsonl", lines)


# Judging an image


def nearest(image: np.ndarray) -> list[np.ndarray]:
    """Return where an image (H, W, 3) has the two colours of the subject rather than another, each (H, W)."""
    distances = np.stack([np.square(image - np.array(color)).sum(-1) for color in SHAPE_COLORS.values()])
    return [(distances.argmin(0) == list(SHAPE_COLORS).index(color)).astype(np.float32) for color in PATTERN]


@functools.cache
def quarters() -> tuple[list[np.ndarray], Template]:
    """Return where the subject in the middle has its two colours, each (H, W), and its template."""
    masks = nearest(np.asarray(draw_subject(GROUND, (SIDE // 2, SIDE // 2)), dtype=np.float32))
    return masks, template(masks[0] + masks[1])


class Judged(NamedTuple):
    """Facts about an image, each from 0 to 1; None where the prompt asks for nothing.

    Attributes:
        iou: best IoU of the subject's shape over all placements.
        pattern: share of the shape there that has the right one of the two colours, less that with the other one.
    """

    iou: float
    pattern: float
    ground: bool
    place: bool | None
    companion: bool | None
    copied_ground: bool
    copied_place: bool

    @property
    def score(self) -> float:
        """IoU times pattern, times the share of ground, place and companion that match the prompt."""
        rest = [one for one in (self.ground, self.place, self.companion) if one is not None]
        return self.iou * self.pattern * sum(rest) / len(rest)


def judge(image: np.ndarray, wanted: Asked) -> Judged:
    """Judge an image (H, W, 3) in [0, 255]."""
    colors = nearest(image)
    masks, searched = quarters()
    iou, (x, y) = located(colors[0] + colors[1], searched)
    moved = [np.roll(mask, (y - SIDE // 2, x - SIDE // 2), (0, 1)) for mask in masks]
    there = float(((colors[0] + colors[1]) * (moved[0] + moved[1])).sum())
    right = sum(float((color * mask).sum()) for color, mask in zip(colors, moved, strict=True))
    at = corner(Shape(SUBJECT, "", x, y, RADIUS))
    one = wanted.companion
    return Judged(
        iou=iou,
        pattern=max(0.0, 2 * right / max(there, 1) - 1),
        ground=near(image, wanted.ground).mean() > 0.5,
        place=None if wanted.place is None else iou >= SHOWN and at == wanted.place,
        companion=None if one is None else find_shape(image, one.kind, one.color) is not None,
        copied_ground=near(image, GROUND).mean() > 0.5,
        copied_place=iou >= SHOWN and max(abs(x - PLACE[0]), abs(y - PLACE[1])) <= 3,
    )


# Runs


def results(run: Path, step: int) -> list[np.ndarray]:
    """Return the images that a run drew at a step, in the order of the prompts."""
    return [parts(path)[-2] for path in sorted((run / "samples" / f"step-{step:06d}").glob("*.png"))]


@functools.cache
def judged(run: Path, step: int) -> list[Judged]:
    """Return the judgements of a run's images at a step."""
    return [judge(*one) for one in zip(results(run, step), asked(), strict=True)]


MOMENTS = tuple(range(EVERY, STEPS + 1, EVERY))


def best(overrides: Sequence[str]) -> tuple[str, int]:
    """Return the learning rate and the step that are best on the prompts that choose, with the first seed.

    It goes on to higher or lower rates until the neighbours of the best one are worse.
    """

    def score(rate: str, step: int) -> float:
        [run] = train(*overrides, f"optimizer.lr={rate}", seeds=SEEDS[:1])
        return sum(one.score for one in judged(run, step)[:CHOICE])

    tried: dict[int, tuple[float, int]] = {}
    index = len(RATES) // 2
    while True:
        for one in {index - 1, index, index + 1} & {*range(len(RATES))} - {*tried}:
            tried[one] = max((score(RATES[one], step), step) for step in MOMENTS)
        if index == (index := max(tried, key=lambda one: tried[one])):
            return RATES[index], tried[index][1]


# Attributes of `Judged` by the headers of their columns.
FIGURES = {
    "score": "score",
    "IoU": "iou",
    "pattern": "pattern",
    "ground": "ground",
    "corner": "place",
    "companion": "companion",
    "ground copied": "copied_ground",
    "place copied": "copied_place",
}


def figures(found: Sequence[Judged]) -> Figures:
    """Return the mean of each figure in percent, over the images whose prompts ask for it."""
    values = {
        name: [value for value in map(attrgetter(read), found) if value is not None] for name, read in FIGURES.items()
    }
    return {name: float(100 * np.mean(one)) for name, one in values.items()}


def from_one_image(overrides: Sequence[str]) -> list[Figures]:
    """Return the figures on the reported prompts, at the learning rate and the step of `best`."""
    if overrides[-1] == UNTRAINED:
        [run] = train(*overrides[:-1], f"optimizer.lr={RATES[len(RATES) // 2]}", seeds=SEEDS[:1])
        return [figures(judged(run, 0)[CHOICE:])]
    rate, step = best(overrides)
    runs = train(*overrides, f"optimizer.lr={rate}", seeds=SEEDS)
    return [{"learning rate": float(rate), "step": step} | figures(judged(run, step)[CHOICE:]) for run in runs]


def along_the_run(overrides: Sequence[str]) -> list[Figures]:
    """Return the score, and the shares of asked corners and of copied places, at each step."""
    rate, _ = best(overrides)
    found = []
    for run in train(*overrides, f"optimizer.lr={rate}", seeds=SEEDS):
        at = {step: figures(judged(run, step)[CHOICE:]) for step in MOMENTS}
        found.append({f"{name}, {step}": at[step][name] for name in CURVES for step in MOMENTS})
    return found


CURVES = ("score", "corner", "place copied")

# Bands of t

BANDS = {
    "0 to 1": (0.0, 1.1),
    "0.75 to 1": (0.75, 1.1),
    "0.5 to 1": (0.5, 1.1),
    "0 to 0.75": (0.0, 0.75),
    "0 to 0.5": (0.0, 0.5),
}


def in_band(words: Sequence[str]) -> list[Figures]:
    """Return the figures of plain LoRAs of rank 16 that predict only in a band of t, and the base in the others."""
    low, high = BANDS[words[-1]]
    overrides = ADAPTERS["`lora`, rank 16"]
    rate, step = best(overrides)
    found = []
    for seed, run in zip(SEEDS, train(*overrides, f"optimizer.lr={rate}", seeds=SEEDS), strict=True):
        pipe = pipeline(SHAPES)
        with LOADING:
            pipe.load_lora_weights(run / "lora" / f"step-{step:06d}")

        def switch(pipe: Any, index: int, *more: Any) -> dict[str, Any]:
            """Switch the LoRA for the next step."""
            t = 1.0 if index < 0 else float(pipe.scheduler.sigmas[index + 1])
            (pipe.enable_lora if low <= t < high else pipe.disable_lora)()
            return {}

        switch(pipe, -1)
        prompts = [one.prompt for one in asked()[CHOICE:]]
        images = make(pipe, prompts, seeds=[seed] * TEST, callback_on_step_end=switch)
        found.append(figures([judge(*one) for one in zip(images, asked()[CHOICE:], strict=True)]))
    return found


# Image


PROMPTED = slice(CHOICE, CHOICE + 8)  # the prompts of the image


def subject_image() -> Image.Image:
    """Return the training image and eight prompts, as columns: the base, rank 16 at its best, answers."""
    rows: list[list[np.ndarray]] = []
    training = np.asarray(draw_subject(GROUND, PLACE), dtype=np.float32)
    for overrides in [*SIXTEEN.values(), *PLACED.values()]:
        rate, step = best(overrides)
        run = train(*overrides, f"optimizer.lr={rate}", seeds=SEEDS)[0]
        for moment in (step,) if rows else (0, step):
            rows.append([training, *results(run, moment)[PROMPTED]])
    answers = [answer(one) for one in asked()[PROMPTED]]
    return grid([*rows, [np.full_like(training, 128), *map(np.asarray, answers)]])


NAMES = ("lora", "tlora", "ortho_tlora")
UNTRAINED = "untrained"
ADAPTERS = {
    f"`{name}`, rank {rank}": [*COMMON, f"adapter={name}", f"adapter.rank={rank}"]
    for most in RANKS
    for name, rank in zip(NAMES, (most, most, min(most, MOST_ORTHOGONAL)), strict=True)
}
SIXTEEN = {label: row for label, row in ADAPTERS.items() if label.endswith("rank 16")}
PLACED = {
    f"{label}, captioned `top left`": [*row, "data.root=WORK/subject/placed.jsonl"] for label, row in SIXTEEN.items()
}
SECTIONS = [
    Section(
        "subject",
        {"the base": [*ADAPTERS["`lora`, rank 16"], UNTRAINED], **ADAPTERS, **PLACED},
        from_one_image,
        {"learning rate": 4, "step": 0, **dict.fromkeys(FIGURES, 0)},
        write=write_data,
        image=subject_image,
        headers=["training image", *(one.prompt.replace(SUBJECT, "...") for one in asked()[PROMPTED])],
        labels=["the base", *SIXTEEN, *PLACED, "answer"],
    ),
    Section(
        "subject_steps",
        SIXTEEN | PLACED,
        along_the_run,
        {f"{name}, {step}": 0 for name in CURVES for step in MOMENTS},
        write=write_data,
    ),
    Section(
        "subject_bands",
        {name: [*COMMON, name] for name in BANDS},
        in_band,
        dict.fromkeys(FIGURES, 0),
        corner="t",
        write=write_data,
    ),
]
