"""Section on sliders: how the strength of an edit rises with the scale of its LoRA."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from benchmarks.shapes.runs import SEEDS, TRAIN, WORK, Figures, Section, command, grid, train, write_table
from benchmarks.shapes.drawings import SHAPE_COLORS, Scene, draw, random_scene

SCALES = (-2, -1, 0, 1, 2)
HELD_OUT = 8
# Number of held-out images of each slider in the grid.
SHOWN = 2


def lit(random: Random) -> tuple[Image.Image, Image.Image, str]:
    """Draw a scene, darker and lighter."""
    scene = draw(random_scene(random))
    black, white = (Image.new("RGB", scene.size, color) for color in ("black", "white"))
    return Image.blend(scene, black, 0.25), Image.blend(scene, white, 0.25), "more light"


def grown(random: Random) -> tuple[Image.Image, Image.Image, str]:
    """Draw a shape, smaller and larger."""
    shape = random.choice(random_scene(random).shapes)
    ground = random.choice([color for color in SHAPE_COLORS if color != shape.color])
    sizes = (replace(shape, radius=radius, x=32, y=32) for radius in (9, 14))
    small, large = (draw(Scene(ground, (one,))) for one in sizes)
    return small, large, "a larger shape"


def light(image: np.ndarray) -> float:
    """Return the mean level of an image."""
    return float(image.mean())


def area(image: np.ndarray) -> float:
    """Return the percentage of an image that differs from the colour of its ground, which is in the corner."""
    return 100 * float((np.abs(image - image[2, 2]).max(axis=-1) > 60).mean())


def folder(label: str) -> str:
    """Return the name of a slider's folder in WORK."""
    return label.replace(" ", "_")


# How the pairs are drawn, and the strength of an image, by instruction.
DIALS: dict[str, tuple[Callable[[Random], tuple[Image.Image, Image.Image, str]], Callable[[np.ndarray], float]]] = {
    "more light": (lit, light),
    "a larger shape": (grown, area),
}
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


def draw_sliders() -> None:
    """Draw the pairs of each slider, and a folder of held-out controls."""
    for label, (draw_pair, _) in DIALS.items():
        random, controls = Random(13), WORK / folder(label) / "controls"
        write_table(folder(label), [draw_pair(random) for _ in range(TRAIN + HELD_OUT)], TRAIN)
        controls.mkdir(exist_ok=True)
        for path in sorted(controls.parent.glob("*-before.png"))[TRAIN:]:
            shutil.copy(path, controls)


def edited(label: str, run: Path, seed: int) -> dict[int, list[np.ndarray]]:
    """Return the held-out images at each scale, which predict.py makes once."""
    made, controls = run / "strips", WORK / folder(label) / "controls"
    if not (run / "predicted").is_file():
        shutil.rmtree(made, ignore_errors=True)
        settings = [f"lora={run}", f"lora_scale={list(SCALES)}", f"seed={seed}", f"output_dir={made}"]
        command("predict.py", *settings, f"image={controls}", f"prompt={label}")
        (run / "predicted").touch()
    found: dict[int, list[np.ndarray]] = {scale: [] for scale in SCALES}
    for line in (made / "predictions.jsonl").read_text().splitlines():
        facts = json.loads(line)
        with Image.open(made / facts["file"]) as image:
            found[int(facts["lora_scale"])].append(np.asarray(image.convert("RGB"), dtype=np.float32))
    return found


def strengths(overrides: Sequence[str]) -> list[Figures]:
    """Return the mean strength of the held-out images at each scale."""
    [label] = [label for label, row in SLIDERS.items() if row == overrides]
    _, strength = DIALS[label]
    made = [edited(label, run, seed) for seed, run in zip(SEEDS, train(*overrides), strict=True)]
    return [{str(scale): float(np.mean(list(map(strength, one[scale])))) for scale in SCALES} for one in made]


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
        {str(scale): 1 for scale in SCALES},
        corner="`lora_scale`",
        draw=draw_sliders,
        image=slider_image,
        headers=["control", *map(str, SCALES)],
        labels=list(SLIDERS),
    )
]
