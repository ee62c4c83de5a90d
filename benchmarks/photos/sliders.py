"""Section on sliders: how the strength of an edit rises with the scale of its LoRA."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

from benchmarks.photos.pairs import photographs, write_table
from benchmarks.photos.runs import SEEDS, WORK, Figures, Section, command, grid, train

SCALES = (-1.0, -0.5, 0.0, 0.5, 1.0)
# Number of held-out images of each slider in the grid.
SHOWN = 2


def light(image: np.ndarray) -> float:
    """Return the mean level of an image."""
    return float(image.mean())


def colour(image: np.ndarray) -> float:
    """Return the mean difference between the strongest and the weakest channel."""
    return float((image.max(-1) - image.min(-1)).mean())


# Pillow's enhancement, and the strength of an image, by instruction.
DIALS: dict[str, tuple[Callable[[Image.Image], ImageEnhance._Enhance], Callable[[np.ndarray], float]]] = {
    "more light": (ImageEnhance.Brightness, light),
    "more color": (ImageEnhance.Color, colour),
}


def folder(label: str) -> str:
    """Return the name of a slider's folder in WORK."""
    return label.replace(" ", "_")


SLIDERS = {
    label: [
        "objective=slider",
        f"data.root=WORK/{folder(label)}/train.jsonl",
        "data.val_root=null",
        "callbacks.sample_images=null",
        "~callbacks.validation",
    ]
    for label in DIALS
}


def write_sliders() -> None:
    """Write the pairs of each slider, weaker and stronger, and a folder of held-out controls."""
    train, held_out = ([image for _, image, _ in photographs(part)] for part in ("train", "held_out"))
    for label, (enhance, _) in DIALS.items():
        pairs = [(enhance(image).enhance(0.6), enhance(image).enhance(1.4), label) for image in train]
        write_table(folder(label), pairs, len(pairs))
        controls = WORK / folder(label) / "controls"
        controls.mkdir(exist_ok=True)
        for index, image in enumerate(held_out):
            image.resize((64, 64), Image.Resampling.LANCZOS).save(controls / f"{index}.png")


def edited(label: str, run: Path, seed: int) -> dict[float, list[np.ndarray]]:
    """Return the held-out images at each scale, which predict.py makes once."""
    made, controls = run / "strips", WORK / folder(label) / "controls"
    if not (run / "predicted").is_file():
        shutil.rmtree(made, ignore_errors=True)
        settings = [f"lora={run}", f"lora_scale={list(SCALES)}", f"seed={seed}", f"output_dir={made}"]
        command("predict.py", *settings, f"image={controls}", f"prompt={label}")
        (run / "predicted").touch()
    found: dict[float, list[np.ndarray]] = {scale: [] for scale in SCALES}
    for line in (made / "predictions.jsonl").read_text().splitlines():
        facts = json.loads(line)
        with Image.open(made / facts["file"]) as image:
            found[facts["lora_scale"]].append(np.asarray(image.convert("RGB"), dtype=np.float32))
    return found


def strengths(overrides: Sequence[str]) -> list[Figures]:
    """Return the mean strength of the held-out images at each scale."""
    [label] = [label for label, row in SLIDERS.items() if row == overrides]
    _, strength = DIALS[label]
    made = [edited(label, run, seed) for seed, run in zip(SEEDS, train(*overrides), strict=True)]
    return [{f"{scale:g}": float(np.mean(list(map(strength, one[scale])))) for scale in SCALES} for one in made]


def slider_image() -> Image.Image:
    """Return held-out images of each slider, as columns: control, then each scale."""
    rows = []
    for label, overrides in SLIDERS.items():
        made = edited(label, train(*overrides)[0], SEEDS[0])
        for index, path in enumerate(sorted((WORK / folder(label) / "controls").iterdir())[:SHOWN]):
            with Image.open(path) as control:
                rows.append([np.asarray(control.convert("RGB")), *(made[scale][index] for scale in SCALES)])
    return grid(rows)


SECTIONS = [
    Section(
        "slider",
        SLIDERS,
        strengths,
        {f"{scale:g}": 1 for scale in SCALES},
        corner="`lora_scale`",
        write=write_sliders,
        image=slider_image,
        headers=["control", *(f"{scale:g}" for scale in SCALES)],
        labels=list(SLIDERS),
    )
]
