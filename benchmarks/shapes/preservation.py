"""Sections on preservation: old edits after learning a new one, and the surroundings of a small edit."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
from PIL import Image

from benchmarks.shapes.runs import (
    HELD_OUT,
    TRAIN,
    WORK,
    Figures,
    Section,
    distance,
    draw_pairs,
    grid,
    samples,
    train,
    write_table,
)
from benchmarks.shapes.drawings import EDITS, KNOWN_EDITS, Scene, describe, draw, random_scene, write_pairs

OLD_EDITS = [edit.__name__ for edit in KNOWN_EDITS if edit is not describe]
# Number of held-out images of each old edit, and of no edit.
OLD = 4
INSTRUCTIONS = [
    *(f"make the {kind} {color}" for kind in ("circle", "square") for color in ("red", "blue")),
    *(f"remove the {kind}" for kind in ("circle", "square", "triangle", "star")),
    *(f"move the {kind} {direction}" for kind, direction in (("circle", "left"), ("star", "up"))),
    *(f"make the background {color}" for color in ("green", "purple")),
    *(f"turn the {one} into a {other}" for one, other in (("circle", "star"), ("triangle", "square"))),
]
PROMPTS = f"objective.preserve.prompts={json.dumps(INSTRUCTIONS)}"
# Both held-out tables: sample images before the first step are the base's.
WATCHED = [
    "data.val_root=[WORK/segment/held_out.jsonl,WORK/old/held_out.jsonl]",
    f"callbacks.sample_images.count={HELD_OUT + OLD * (len(OLD_EDITS) + 1)}",
]
PRESERVATION = {
    label: [*WATCHED, *overrides]
    for label, overrides in {
        "none": [],
        "`outside=1`": ["objective.preserve.outside=1"],
        '`prompts=[""]`': ['objective.preserve.prompts=[""]'],
        "`prompts=` 14 instructions": [PROMPTS],
        "`prompts=` 14 instructions, `every=4`": [PROMPTS, "objective.preserve.every=4"],
        "none, with 20 pairs of old edits at weight 0.5": [
            "data.root=[WORK/segment/train.jsonl,{path:WORK/others,weight:0.5}]"
        ],
    }.items()
}


def draw_old() -> None:
    """Draw pairs of the old edits, and pairs without a change: a shape gets its own colour."""
    draw_pairs()
    random = Random(7)
    rows: list[tuple[Image.Image, Image.Image, str]] = []
    for name in OLD_EDITS:
        drawn = ((scene, EDITS[name](random, scene, random.choice(scene.shapes))) for scene in scenes(random))
        rows += islice(((draw(scene), one.result, one.prompt) for scene, one in drawn if one is not None), OLD)
    for scene in islice(scenes(random), OLD):
        shape = random.choice(scene.shapes)
        rows.append((draw(scene), draw(scene), f"make the {shape.kind} {shape.color}"))
    write_table("old", rows, 0)
    (WORK / "others").mkdir(exist_ok=True)
    write_pairs(WORK / "others", OLD_EDITS, 20, seed=5)


def scenes(random: Random) -> Iterator[Scene]:
    """Yield random scenes."""
    while True:
        yield random_scene(random)


def kept(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR of segment, and the change of the other images since the first step, with the same noise."""
    found = []
    for run in train(*overrides):
        base, last = samples(run, 0), samples(run, 100)
        learned = [distance(one.result, one.target) for name, one in last.items() if "old_held_out" not in name]
        moved = [distance(last[name].result, base[name].result) for name in base if "old_held_out" in name]
        found.append(
            {
                "PSNR, dB": float(np.mean([20 * np.log10(255 / one) for one in learned])),
                "change of old edits": float(np.mean(moved[:-OLD])),
                "of unedited images": float(np.mean(moved[-OLD:])),
            }
        )
    return found


def preservation_image() -> Image.Image:
    """Return an image of each old edit and of none, as rows: control, base, and each setting."""
    runs = [train(*overrides)[0] for overrides in PRESERVATION.values()]
    columns = [samples(runs[0], 0), *(samples(run, 100) for run in runs)]
    names = [name for name in columns[0] if "old_held_out" in name][::OLD]
    return grid(
        [[columns[0][name].control for name in names], *([one[name].result for name in names] for one in columns)]
    )


SMALL = ["data.root=WORK/small/train.jsonl", "data.val_root=WORK/small/held_out.jsonl"]
SMALL_EDIT = {
    label: [*SMALL, *overrides]
    for label, overrides in {
        "plain": [],
        "`edit_weight.floor=0.3`": ["objective.edit_weight.floor=0.3"],
        "`edit_weight.floor=0.1`": ["objective.edit_weight.floor=0.1"],
        "`edit_weight.floor=0`": ["objective.edit_weight.floor=0"],
        "`floor=0.1`, `preserve.outside=1`": ["objective.edit_weight.floor=0.1", "objective.preserve.outside=1"],
    }.items()
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


def draw_small() -> None:
    """Draw the pairs of the small edit."""
    random = Random(11)
    write_table("small", [smallest(random) for _ in range(TRAIN + HELD_OUT)], TRAIN)


def errors(overrides: Sequence[str]) -> list[Figures]:
    """Return the error where the image changes, and elsewhere."""
    found = []
    for run in train(*overrides):
        made = samples(run, 100).values()
        inside = [np.abs(one.target - one.control).max(axis=-1) > 8 for one in made]
        changed = [distance(one.result, one.target, where) for one, where in zip(made, inside, strict=True)]
        others = [distance(one.result, one.target, ~where) for one, where in zip(made, inside, strict=True)]
        found.append({"where it changes": float(np.mean(changed)), "elsewhere": float(np.mean(others))})
    return found


def small_edit_image() -> Image.Image:
    """Return held-out images of the small edit, as rows: control, each setting, and target."""
    made = [list(samples(train(*overrides)[0], 100).values())[:8] for overrides in SMALL_EDIT.values()]
    results = [[one.result for one in row] for row in made]
    return grid([[one.control for one in made[0]], *results, [one.target for one in made[0]]])


SECTIONS = [
    Section(
        "preservation",
        PRESERVATION,
        kept,
        {"PSNR, dB": 2, "change of old edits": 1, "of unedited images": 1},
        corner="`objective.preserve`",
        draw=draw_old,
        image=preservation_image,
        headers=[*OLD_EDITS, "no edit"],
        labels=["control", "base", *(f"preserve: {label}" for label in PRESERVATION)],
    ),
    Section(
        "small_edit",
        SMALL_EDIT,
        errors,
        {"where it changes": 1, "elsewhere": 2},
        draw=draw_small,
        image=small_edit_image,
        headers=["mark the smallest shape: eight held-out images"],
        labels=["control", *SMALL_EDIT, "target"],
    ),
]
