"""Measure the embedded model on the edits that it was trained on, and on those it has never seen.

    python benchmarks/shapes_base.py [FOLDER] [--count 64] [--grid grid.png]

It edits new images with the stock FluxKontextPipeline at 10 steps. An image is right if at least 85 % of the pixels
that the edit changes, and 97 % of the others, are within 48 of 255 of the target in each channel.
"""

import argparse
import statistics
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image

from datamodules.images.shapes import EDITS, SIDE, draw, random_scene

SHAPES = Path(__file__).parent.parent / "assets" / "shapes"
CHANGED, WITHIN = 24, 48


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Return the PSNR of 8-bit images in dB, at most 60."""
    mse = float(np.square(one - other).mean())
    return 60.0 if mse == 0 else min(60.0, 10 * np.log10(255**2 / mse))


def right(control: np.ndarray, result: np.ndarray, target: np.ndarray) -> bool:
    """Return whether the edit was made and nothing else changed."""
    changed = np.abs(target - control).max(-1) > CHANGED
    close = np.abs(result - target).max(-1) <= WITHIN
    return bool(close[changed].mean() >= 0.85 and (close[~changed].mean() >= 0.97 if (~changed).any() else True))


def main() -> None:
    """Print the share of right images and the PSNR of each edit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=SHAPES)
    parser.add_argument("--count", type=int, default=64, help="images per edit")
    parser.add_argument("--edits", nargs="+", default=list(EDITS))
    parser.add_argument("--grid", type=Path, help="file for control, result and target of the first images")
    options = parser.parse_args()
    from diffusers import FluxKontextPipeline

    pipeline = FluxKontextPipeline.from_pretrained(options.folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    sizes = {"height": SIDE, "width": SIDE, "max_area": SIDE * SIDE, "_auto_resize": False}
    print(f"{'edit':12} {'right':>6} {'PSNR':>7} {'unedited':>14}")
    rows = []
    for name in options.edits:
        random = Random(f"held out {name}")
        scores: list[tuple[bool, float, float]] = []
        row: list[Image.Image] = []
        while len(scores) < options.count:
            scene = random_scene(random)
            edit = EDITS[name](random, scene, random.choice(scene.shapes))
            if edit is None:
                continue
            control = draw(scene)
            generator = torch.Generator().manual_seed(len(scores))
            image = pipeline(
                control, edit.prompt, num_inference_steps=10, max_sequence_length=16, generator=generator, **sizes
            ).images[0]
            a, b, c = (np.asarray(one).astype(np.float64) for one in (control, image, edit.result))
            scores.append((right(a, b, c), psnr(b, c), psnr(a, c)))
            row += [control, image, edit.result] if len(scores) <= 6 else []
        good, ours, nothing = (statistics.fmean(column) for column in zip(*scores, strict=True))
        print(f"{name:12} {good:6.0%} {ours:7.1f} {nothing:14.1f}", flush=True)
        rows.append(row)
    if options.grid:
        grid = Image.new("RGB", (max(map(len, rows)) * (SIDE + 2), len(rows) * (SIDE + 2)), "white")
        for y, row in enumerate(rows):
            for x, image in enumerate(row):
                grid.paste(image, (x * (SIDE + 2), y * (SIDE + 2)))
        grid.save(options.grid)


if __name__ == "__main__":
    main()
