"""Teach Shapes to undo five recipes of data.control, from photographs without pairs."""

import shutil
from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from PIL import Image
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure

from benchmarks.shapes.photographs import HELD_OUT, TRAINED_ON, crops, decoded
from benchmarks.shapes.runs import WORK, Figures, Made, Section, grid, samples, train
from report.image_metrics import EditMetrics

# Strengths at which the damage exceeds the autoencoder's own on images of 64x64.
RECIPES = {
    "blur": "blur: [2, 4]",
    "noise": "noise: [20, 50]",
    "jpeg": "jpeg: [5, 10]",
    "grey": "grey: 1",
    "hole": "hole: [0.05, 0.3]",
}
SIDE, CROPS, HELD_OUT_CROPS, STEPS = 64, 40, 12, 120
COMMON = [
    "data.root=WORK/photographs/train",
    "data.val_root=WORK/photographs/held_out",
    # All seeds see the same condition images.
    "data.seed=0",
    "data.batch_size=8",
    "optimizer.lr=5e-3",
    f"trainer.max_steps={STEPS}",
    f"callbacks.sample_images.count={HELD_OUT_CROPS}",
]
ROWS = {f"`{recipe}`": [f"data.control={{recipe: {{{recipe}}}, variants: 4}}", *COMMON] for recipe in RECIPES.values()}
# The LoRA's results, and what they are compared with.
KINDS = ("LoRA", "unedited", "unedited, decoded", "limit")


def draw() -> None:
    """Write the crops of photographs, without pairs."""
    random = Random(0)
    for name, names, count in (("train", TRAINED_ON, CROPS), ("held_out", HELD_OUT, HELD_OUT_CROPS)):
        shutil.rmtree(folder := WORK / "photographs" / name, ignore_errors=True)
        folder.mkdir(parents=True)
        for index, crop in enumerate(crops(names, count, SIDE, random)):
            crop.save(folder / f"{index:02d}.png")


def kinds(made: Made) -> list[np.ndarray]:
    """Return the images of KINDS, (H, W, 3) in [0, 255]."""
    return [made.result, made.control, decoded(made.control), decoded(made.target)]


def figures(overrides: Sequence[str]) -> list[Figures]:
    """Return means over the held-out crops, measured as validation does."""
    found = []
    for run in train(*overrides):
        metrics = {
            f"{name} {kind}": metric
            for kind in KINDS
            for name, metric in {
                "PSNR": PeakSignalNoiseRatio(data_range=1.0, dim=(1, 2, 3)),
                "SSIM": StructuralSimilarityIndexMeasure(data_range=1.0),
                "strength": EditMetrics(),
            }.items()
        }
        for made in samples(run, STEPS).values():
            for kind, one in zip(KINDS, kinds(made), strict=True):
                result, target, control = map(as_tensor, (one, made.target, made.control))
                metrics[f"PSNR {kind}"].update(result, target)
                metrics[f"SSIM {kind}"].update(result, target)
                metrics[f"strength {kind}"].update(result, target, control)
        values = {name: metric.compute() for name, metric in metrics.items()}
        found.append(
            {name: float(value["strength"] if isinstance(value, dict) else value) for name, value in values.items()}
        )
    return found


def as_tensor(image: np.ndarray) -> torch.Tensor:
    """Return an image (H, W, 3) in [0, 255] as (1, 3, H, W) in [0, 1]."""
    return torch.from_numpy(image).permute(2, 0, 1)[None] / 255


def image() -> Image.Image:
    """Return two held-out crops for each recipe, as columns, and KINDS and targets as rows."""
    columns = []
    for row in ROWS.values():
        made = list(samples(train(*row)[0], STEPS).values())
        columns += [[*kinds(one), one.target] for one in made[:2]]
    return grid([[column[index] for column in columns] for index in (1, 0, 3, 4)])


SECTIONS = [
    Section(
        "control_recipes",
        ROWS,
        figures,
        {
            **{f"PSNR {kind}": 1 for kind in KINDS},
            **{f"SSIM {kind}": 2 for kind in KINDS},
            **{f"strength {kind}": 2 for kind in ("LoRA", "unedited, decoded")},
        },
        corner="`data.control`",
        draw=draw,
        image=image,
        headers=list(RECIPES),
        labels=("unedited", "LoRA", "limit", "target"),
    )
]
