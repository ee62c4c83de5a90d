"""Measure how the strength of a slider rises with its scale."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from benchmarks.shapes_runs import Rows, command, run, save_grid, table, write_table
from datamodules.images.shapes import COLORS, Scene, draw, random_scene

SCALES = (-2, -1, 0, 1, 2)
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
    ground = random.choice([color for color in COLORS if color != shape.color])
    sizes = (replace(shape, radius=radius, x=32, y=32) for radius in (9, 14))
    small, large = (draw(Scene(ground, (one,))) for one in sizes)
    return small, large, "a larger shape"


def light(image: np.ndarray) -> float:
    """Return the mean level of an image."""
    return float(image.mean())


def area(image: np.ndarray) -> float:
    """Return the share of an image that differs from the colour of its ground, which is in the corner."""
    return float((np.abs(image - image[2, 2]).max(axis=-1) > 60).mean())


SLIDERS = {"more light": (lit, light), "a larger shape": (grown, area)}


def slider(pairs: Path, steps: int, seeds: range, images: Path | None) -> None:
    """Measure whether a larger scale makes more of the edit, from -2 to 2, on held-out images."""
    shown: list[list[np.ndarray]] = []

    def rows() -> Rows:
        for label, (draw_pair, strength) in SLIDERS.items():
            folder, random = pairs / label.replace(" ", "_"), Random(13)
            write_table(folder, [draw_pair(random) for _ in range(32)], 24)
            (folder / "controls").mkdir()
            for path in sorted(folder.glob("*-before.png"))[24:]:
                path.rename(folder / "controls" / path.name)
            measured = []
            for seed in seeds:
                data = [f"data.root={folder}/train.jsonl", "data.val_root=null"]
                off = ["callbacks.sample_images=null", "~callbacks.validation"]
                output, _ = run(pairs, steps, f"seed={seed}", "objective=slider", *data, *off)
                made = output.parent / "strips"
                settings = [f"lora={output}", f"lora_scale={list(SCALES)}", f"seed={seed}", f"output_dir={made}"]
                command(pairs, "predict.py", *settings, f"image={folder}/controls", f"prompt={label}")
                found: dict[float, list[np.ndarray]] = {scale: [] for scale in SCALES}
                for line in (made / "predictions.jsonl").read_text().splitlines():
                    facts = json.loads(line)
                    with Image.open(made / facts["file"]) as image:
                        found[facts["lora_scale"]].append(np.asarray(image.convert("RGB"), dtype=np.float32))
                values = np.array([[strength(one) for one in found[scale]] for scale in SCALES])
                rising = np.diff(values, axis=0) > 0
                means = {f"{scale:+d}": float(mean) for scale, mean in zip(SCALES, values.mean(axis=1), strict=True)}
                within_one = float(rising[1:-1].all(axis=0).mean())
                measured.append(means | {"rises to 1": within_one, "rises to 2": float(rising.all(axis=0).mean())})
                if seed == seeds[0]:
                    for number, path in enumerate(sorted((folder / "controls").iterdir())[:SHOWN]):
                        with Image.open(path) as control:
                            shown.append([np.asarray(control.convert("RGB")), *(found[one][number] for one in SCALES)])
            yield label, measured

    table("slider", rows())
    if images is not None:
        save_grid(shown, images / "slider.png")
