"""Real photographs, and pairs of them in folders."""

import json
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image


def photograph(name: str, width: int, height: int) -> Image.Image:
    """Return a real photograph, scaled."""
    return Image.fromarray(getattr(skimage.data, name)()).resize((width, height), Image.Resampling.LANCZOS)


def make_pairs(root: Path, sizes, target=lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) -> Path:
    """Write pairs of photographs and their mirror images into folders."""
    for folder in ("training_images", "control_images"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    names = ("astronaut", "chelsea", "coffee", "rocket", "retina")
    for i, (width, height) in enumerate(sizes):
        image = photograph(names[i % len(names)], width + i, height).crop((i, 0, width + i, height))
        image.save(root / "control_images" / f"{i:02d}.png")
        target(image).save(root / "training_images" / f"{i:02d}.png")
        (root / "training_images" / f"{i:02d}.txt").write_text(f"mirror picture {i}")
    return root


def pixels(path):
    """Return the pixels of an image, or of the only prediction for an image of that name."""
    if not path.is_file():
        [path] = path.parent.glob(f"{path.stem}_p00_*.png")
    return np.asarray(Image.open(path)).astype(int)


def records(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
