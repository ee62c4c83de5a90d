"""Section on the embedded model: the edits and captions that it was trained on, and those it has never seen.

    python -m benchmarks.shapes.base FOLDER     # the same of another pipeline

It makes new images with the stock FluxKontextPipeline at 10 steps. An edit is right if at least 85 % of the pixels that
it changes, and 97 % of the others, are within 48 of 255 of the target in each channel. An image made from a caption is
right if it has the ground, and each shape in its colour and corner.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmarks.shapes.runs import LOADING, Figures, Section, distance, grid
from benchmarks.shapes.drawings import (
    EDITS,
    SHAPE_COLORS,
    SHAPE_KINDS,
    SIDE,
    Scene,
    Shape,
    corner,
    describe,
    draw,
    random_scene,
)
from lightning_modules.pretrained.repository import SHAPES

COUNT = 64
CHANGED, WITHIN = 24, 48
# Mask IoU of a shape that is there.
SHOWN = 0.75
RADII = (8, 9, 10, 11, 12, 13)
# Of captions.
GUIDANCE = 3.0


def right_edit(control: np.ndarray, result: np.ndarray, target: np.ndarray) -> bool:
    """Return whether the edit was made and nothing else changed."""
    changed = np.abs(target - control).max(-1) > CHANGED
    close = np.abs(result - target).max(-1) <= WITHIN
    return bool(close[changed].mean() >= 0.85 and (close[~changed].mean() >= 0.97 if (~changed).any() else True))


def near(image: np.ndarray, color: str) -> np.ndarray:
    """Return a mask (H, W), 1.0 where an image (H, W, 3) has a colour."""
    return (np.abs(image - np.array(SHAPE_COLORS[color])).max(axis=-1) <= WITHIN).astype(np.float32)


class Template(NamedTuple):
    """The Fourier transforms (H, W) of a mask in the middle of an image and of a box around it, and the mask's size."""

    mask: np.ndarray
    box: np.ndarray
    size: float


def template(mask: np.ndarray) -> Template:
    """Return the template of a mask (H, W)."""
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    box = np.zeros_like(mask)
    box[rows[0] - 2 : rows[-1] + 3, columns[0] - 2 : columns[-1] + 3] = 1
    return Template(np.fft.rfft2(mask), np.fft.rfft2(box), float(mask.sum()))


def located(mask: np.ndarray, searched: Template) -> tuple[float, tuple[int, int]]:
    """Return the best IoU of a template with a mask (H, W) around it, and the (x, y) of its middle there."""
    transformed = np.fft.rfft2(mask)
    overlap, around = (np.fft.irfft2(transformed * np.conj(one)) for one in (searched.mask, searched.box))
    iou = overlap / (around + searched.size - overlap)
    row, column = np.unravel_index(iou.argmax(), iou.shape)
    half = SIDE // 2
    return float(iou.max()), ((int(column) + half) % SIDE, (int(row) + half) % SIDE)


@functools.cache
def _templates() -> dict[tuple[str, int], Template]:
    scenes = {
        (kind, radius): Scene("black", (Shape(kind, "white", 32, 32, radius),))
        for kind in SHAPE_KINDS
        for radius in RADII
    }
    return {key: template(near(np.asarray(draw(scene), dtype=np.float32), "white")) for key, scene in scenes.items()}


def find_shape(image: np.ndarray, kind: str, color: str) -> tuple[int, int] | None:
    """Return the middle of a shape of this kind and colour; None if there is none."""
    mask = near(image, color)
    found = {key: located(mask, one) for key, one in _templates().items()}
    iou, (x, y) = max(found[key] for key in found if key[0] == kind)
    others = [one for (name, _), (one, at) in found.items() if name != kind and max(abs(at[0] - x), abs(at[1] - y)) < 7]
    return (x, y) if iou >= max([SHOWN, *others]) else None


def right_image(result: np.ndarray, prompt: str) -> bool:
    """Return whether an image (H, W, 3) has what a caption of `describe` names."""
    shapes, ground = prompt.split(" on ")
    if near(result, ground).mean() < 0.5:
        return False
    for phrase in shapes.split(" and "):
        _, color, kind, *place = phrase.split()
        middle = find_shape(result, kind, color)
        if middle is None or (place and corner(Shape(kind, color, *middle, 0)) not in (" ".join(place), "")):
            return False
    return True


def pipeline(folder: Path) -> Any:
    """Return the pipeline of a folder, in float32."""
    from diffusers import FluxKontextPipeline

    with LOADING:
        loaded = FluxKontextPipeline.from_pretrained(folder, dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def make(
    pipe: Any,
    prompts: Sequence[str],
    controls: Sequence[Image.Image] | None = None,
    seeds: Sequence[int] | None = None,
    **more: Any,
) -> list[np.ndarray]:
    """Return an image (H, W, 3) in [0, 255] for each prompt; by default the seed of its noise is its index.

    Captions, which have no controls, are guided.
    """
    noise = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(prompts))]
    sizes = {"height": SIDE, "width": SIDE, "max_area": SIDE * SIDE, "_auto_resize": False}
    settings = {**sizes, "num_inference_steps": 10, "max_sequence_length": 16, "generator": noise, **more}
    if controls is None:
        settings |= {"true_cfg_scale": GUIDANCE, "negative_prompt": [""] * len(prompts)}
    made = pipe(None if controls is None else list(controls), list(prompts), **settings)
    return [np.asarray(image, dtype=np.float32) for image in made.images]


class Case(NamedTuple):
    """A held-out edit, and its result by a model; captions ignore the control."""

    control: np.ndarray
    target: np.ndarray
    prompt: str
    result: np.ndarray


@functools.cache
def cases(name: str, folder: Path) -> list[Case]:
    """Draw the held-out edits of a name, and let the pipeline of a folder make them."""
    random = Random(f"held out {name}")
    drawn: list[tuple[Image.Image, Image.Image, str]] = []
    while len(drawn) < COUNT:
        scene = random_scene(random)
        edit = EDITS[name](random, scene, random.choice(scene.shapes))
        if edit is not None:
            drawn.append((draw(scene), edit.result, edit.prompt))
    controls, targets, prompts = zip(*drawn, strict=True)
    results = make(pipeline(folder), prompts, None if name == TEXT else controls)
    before, after = ([np.asarray(one, dtype=np.float32) for one in images] for images in (controls, targets))
    return list(map(Case, before, after, prompts, results))


TEXT = describe.__name__


def quality(name: str, folder: Path) -> Figures:
    """Return the percentage of right images; of edits also the PSNR of the results and of the controls in dB."""
    made = cases(name, folder)
    if name == TEXT:
        return {"right, %": 100 * float(np.mean([right_image(one.result, one.prompt) for one in made]))}
    psnrs = [
        [20 * np.log10(255 / max(distance(image, one.target), 0.25)) for image in (one.result, one.control)]
        for one in made
    ]
    right = [right_edit(one.control, one.result, one.target) for one in made]
    ours, nothing = map(float, np.mean(psnrs, axis=0))
    return {"right, %": 100 * float(np.mean(right)), "PSNR, dB": ours, "unedited, dB": nothing}


def of_edit(row: Sequence[str]) -> list[Figures]:
    """Return the figures of the edit that a row names."""
    return [quality(row[0], SHAPES)]


def base_image() -> Image.Image:
    """Return two held-out images of each edit, as columns: control (grey without one), result, target."""
    columns: list[list[np.ndarray]] = []
    for name in EDITS:
        columns.append([])
        for one in cases(name, SHAPES)[:2]:
            control = np.full_like(one.control, 128) if name == TEXT else one.control
            columns[-1] += [control, one.result, one.target]
    return grid(list(zip(*columns, strict=True)))


SECTIONS = [
    Section(
        "base",
        {name: [name] for name in EDITS},
        of_edit,
        {"right, %": 0, "PSNR, dB": 1, "unedited, dB": 1},
        corner="edit",
        image=base_image,
        headers=list(EDITS),
        labels=2 * ("control", "result", "target"),
    )
]

if __name__ == "__main__":
    for name in EDITS:
        figures = quality(name, Path(sys.argv[1])).values()
        print(f"{name:12}", *(f"{value:8.1f}" for value in figures), flush=True)
