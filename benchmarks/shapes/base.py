"""Images that the Shapes model makes from captions, and what is in them.

An image is right if it has the ground, and each shape in its colour and corner.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.photos.runs import LOADING
from benchmarks.shapes.drawings import SHAPE_COLORS, SHAPE_KINDS, SIDE, Scene, Shape, corner, draw

# Levels of 255 by which a colour may differ.
WITHIN = 48
# Mask IoU of a shape that is there.
SHOWN = 0.75
RADII = (8, 9, 10, 11, 12, 13)
# Of captions.
GUIDANCE = 3.0


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
    seeds: Sequence[int],
    **more: Any,
) -> list[np.ndarray]:
    """Return an image (H, W, 3) in [0, 255] for each caption, of the noise of its seed."""
    noise = [torch.Generator().manual_seed(seed) for seed in seeds]
    guidance = {"true_cfg_scale": GUIDANCE, "negative_prompt": [""] * len(prompts)}
    sizes = {"height": SIDE, "width": SIDE, "max_area": SIDE * SIDE, "_auto_resize": False}
    settings = {**sizes, **guidance, "num_inference_steps": 10, "max_sequence_length": 16, "generator": noise, **more}
    made = pipe(None, list(prompts), **settings)
    return [np.asarray(image, dtype=np.float32) for image in made.images]
