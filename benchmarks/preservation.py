"""Measure preservation on Shapes: old edits after learning a new one, and the surroundings of a small edit."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from benchmarks.shapes_runs import Made, Rows, distance, run, samples, save_grid, table, write_table
from datamodules.images.shapes import EDITS, KNOWN, draw, random_scene, write_pairs
from report.tables import read_validation

# Number of held-out images of each old edit, and of no edit.
OLD = 4
INSTRUCTIONS = [
    *(f"make the {kind} {color}" for kind in ("circle", "square") for color in ("red", "blue")),
    *(f"remove the {kind}" for kind in ("circle", "square", "triangle", "star")),
    *(f"move the {kind} {direction}" for kind, direction in (("circle", "left"), ("star", "up"))),
    *(f"make the background {color}" for color in ("green", "purple")),
    *(f"turn the {one} into a {other}" for one, other in (("circle", "star"), ("triangle", "square"))),
]


PRESERVATION = {
    "plain": [],
    "outside=1": ["objective.preserve.outside=1"],
    'prompts=[""]': ['objective.preserve.prompts=[""]'],
    "14 old instructions": [f"objective.preserve.prompts={json.dumps(INSTRUCTIONS)}"],
    "every=4": [f"objective.preserve.prompts={json.dumps(INSTRUCTIONS)}", "objective.preserve.every=4"],
    "20 pairs of old edits": ["data.root=[PAIRS/train-24.jsonl,{path:PAIRS/others,weight:0.5}]"],
}


def draw_old_edits(folder: Path) -> None:
    """Draw held-out pairs of the edits that the base knows, and pairs without a change: a shape gets its own colour."""
    random, rows = Random(7), []
    for edit in KNOWN:
        count = 0
        while count < OLD:
            scene = random_scene(random)
            made = EDITS[edit.__name__](random, scene, random.choice(scene.shapes))
            if made is not None:
                rows.append((draw(scene), made.result, made.prompt))
                count += 1
    for _ in range(OLD):
        scene = random_scene(random)
        shape = random.choice(scene.shapes)
        rows.append((draw(scene), draw(scene), f"make the {shape.kind} {shape.color}"))
    write_table(folder, rows, 0)
    (folder / "train.jsonl").unlink()


def old_edits(pairs: Path, *overrides: str) -> dict[str, Made]:
    """Return the images of the old edits before the first step of a run."""
    count = OLD * (len(KNOWN) + 1)
    data = ["data.val_root=PAIRS/old/held_out.jsonl", f"callbacks.sample_images.count={count}"]
    output, _ = run(pairs, 1, *data, *overrides)
    return samples(output, 0)


def preservation(pairs: Path, steps: int, seeds: range, images: Path | None) -> None:
    """Measure a segment LoRA, and how much it changes the base's old edits."""
    draw_old_edits(pairs / "old")
    (pairs / "others").mkdir()
    write_pairs(pairs / "others", [edit.__name__ for edit in KNOWN], 20, seed=5, change_weight=1)
    base = old_edits(pairs)
    no_edit = list(base)[-OLD:]
    shown: list[dict[str, Made]] = [base]

    def rows() -> Rows:
        for label, overrides in PRESERVATION.items():
            measured = []
            for seed in seeds:
                output, seconds = run(pairs, steps, f"seed={seed}", *overrides)
                moved = old_edits(pairs, f"adapter.init_from={output}")
                far = {name: distance(moved[name].result, base[name].result) for name in base}
                wrong = {name: distance(moved[name].result, moved[name].target) for name in base}
                last = read_validation(output / "validation.csv")[-1]
                measured.append(
                    {
                        "mask IoU": last["mask_iou"],
                        "PSNR, dB": last["psnr"],
                        "old edits moved by": _mean(far, [name for name in base if name not in no_edit]),
                        "no edit moved by": _mean(far, no_edit),
                        "old edits' error": _mean(wrong, [name for name in base if name not in no_edit]),
                        "no edit's error": _mean(wrong, no_edit),
                        "seconds": seconds,
                    }
                )
                if seed == seeds[0]:
                    shown.append(moved)
            yield label, measured

    wrong = {name: distance(one.result, one.target) for name, one in base.items()}
    old = _mean(wrong, [name for name in base if name not in no_edit])
    print(f"the base's own error: old edits {old:.4g}, no edit {_mean(wrong, no_edit):.4g}")
    table("preservation", rows())
    if images is not None:
        names = list(base)[::OLD]
        grid = [[base[name].control for name in names], *([one[name].result for name in names] for one in shown)]
        save_grid(grid, images / "preservation.png")


def _mean(values: dict[str, float], names: Sequence[str]) -> float:
    return float(np.mean([values[name] for name in names]))


SMALL_EDIT = {
    "plain": [],
    "floor=0.3": ["objective.edit_weight.floor=0.3"],
    "floor=0.1": ["objective.edit_weight.floor=0.1"],
    "floor=0": ["objective.edit_weight.floor=0"],
    "floor=0.1, outside=1": ["objective.edit_weight.floor=0.1", "objective.preserve.outside=1"],
}


def smallest(random: Random) -> tuple[Image.Image, Image.Image, str]:
    """Draw a scene whose smallest shape, 4 to 5 pixels in radius, turns white."""
    while True:
        scene = random_scene(random)
        few = scene.background != "white" and len(scene.shapes) > 1
        if few and all(shape.color != "white" for shape in scene.shapes):
            break
    shape = random.choice(scene.shapes)
    small = replace(shape, radius=random.randint(4, 5))
    scene = scene.changed(shape, small)
    return draw(scene), draw(scene.changed(small, replace(small, color="white"))), "mark the smallest shape"


def small_edit(pairs: Path, steps: int, seeds: range, images: Path | None) -> None:
    """Measure the error of a small edit, where the image changes and elsewhere."""
    random = Random(11)
    write_table(pairs / "small", [smallest(random) for _ in range(40)], 24)
    data = ["data.root=PAIRS/small/train.jsonl", "data.val_root=PAIRS/small/held_out.jsonl"]
    shown: list[dict[str, Made]] = []

    def rows() -> Rows:
        for label, overrides in SMALL_EDIT.items():
            measured = []
            for seed in seeds:
                output, _ = run(pairs, steps, f"seed={seed}", *data, *overrides)
                made = samples(output, steps)
                inside = {name: np.abs(one.target - one.control).max(axis=-1) > 8 for name, one in made.items()}
                errors = {
                    "error inside": [distance(one.result, one.target, inside[name]) for name, one in made.items()],
                    "error outside": [distance(one.result, one.target, ~inside[name]) for name, one in made.items()],
                    "error": [distance(one.result, one.target) for one in made.values()],
                }
                last = read_validation(output / "validation.csv")[-1]
                measured.append(
                    {name: float(np.mean(values)) for name, values in errors.items()} | {"val_loss": last["val_loss"]}
                )
                if seed == seeds[0]:
                    shown.append(made)
            yield label, measured

    table("small edit", rows())
    if images is not None:
        names = list(shown[0])[:8]
        ends = [[shown[0][name].control for name in names], [shown[0][name].target for name in names]]
        middle = [[one[name].result for name in names] for one in shown]
        save_grid([ends[0], *middle, ends[1]], images / "small_edit.png")
