"""Section on preservation: what a LoRA does to edits that the base knew, and to photographs that should stay."""

import json
from collections.abc import Sequence

import numpy as np
from photos_pairs import EDITS as KNOWN
from PIL import Image

from benchmarks.photos.pairs import photographs, write_pairs, write_table
from benchmarks.photos.runs import Figures, Section, distance, grid, samples, train

# Names of edits that are watched, and then a copy, each on four held-out photographs.
OLD, EACH = ("brighter", "grey", "sepia", "contrast", "tint blue"), 4
STAYS = "keep it as it is"


def first_prompt(name: str) -> str:
    """Return the first instruction of an edit."""
    return KNOWN[name].prompts.split(" | ")[0]


# Names of other edits that the base knows.
OTHERS = ("darker", "warmer", "colder", "vivid", "pale", "flat", "negative", "swap", "blur")


def preserved(*names: str) -> str:
    """Return the setting that preserves the answers to the first instruction of each edit."""
    return f"objective.preserve.prompts={json.dumps(list(map(first_prompt, names)))}"


# Both held-out tables: sample images before the first step are the base's.
WATCHED = [
    "data.val_root=[WORK/sunset/held_out.jsonl,WORK/old/held_out.jsonl]",
    f"callbacks.sample_images.count={8 + EACH * (len(OLD) + 1)}",
]
PRESERVATION = {
    label: [*WATCHED, *overrides]
    for label, overrides in {
        "none": [],
        "`outside=1`": ["objective.preserve.outside=1"],
        '`prompts=[""]`': ['objective.preserve.prompts=[""]'],
        "`prompts=` these and 9 others": [preserved(*OLD, *OTHERS)],
        "`prompts=` these and 9 others, `every=4`": [preserved(*OLD, *OTHERS), "objective.preserve.every=4"],
        "`prompts=` the 9 others": [preserved(*OTHERS)],
        "none, with 20 pairs of old edits at weight 0.5": [
            "data.root=[WORK/sunset/train.jsonl,{path:WORK/others/train.jsonl,weight:0.5}]"
        ],
    }.items()
}


def write_old() -> None:
    """Write pairs of the old edits, and pairs without a change."""
    write_pairs()
    for table, part, count in (("old", "held_out", EACH), ("others", "train", 4)):
        images = [control for _, control, _ in photographs(part)][:count]
        rows = [(image, KNOWN[name].draw(image), first_prompt(name)) for name in OLD for image in images]
        if part == "held_out":
            rows += [(image, image, STAYS) for image in images]
        write_table(table, rows, 0 if part == "held_out" else len(rows))


def kept(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR of sunset, and the change of the other images since the first step, with the same noise."""
    found = []
    for run in train(*overrides):
        base, last = samples(run, 0), samples(run, 100)
        sunset = [one for name, one in last.items() if "old_held_out" not in name]
        learned = [distance(one.result, one.target) for one in sunset if not np.array_equal(one.control, one.target)]
        moved = [distance(last[name].result, base[name].result) for name in base if "old_held_out" in name]
        found.append(
            {
                "PSNR, dB": float(np.mean([20 * np.log10(255 / one) for one in learned])),
                "change of old edits": float(np.mean(moved[:-EACH])),
                "of unedited images": float(np.mean(moved[-EACH:])),
            }
        )
    return found


def preservation_image() -> Image.Image:
    """Return an image of each old edit and of none, as rows: control, base, and each setting."""
    runs = [train(*overrides)[0] for overrides in PRESERVATION.values()]
    columns = [samples(runs[0], 0), *(samples(run, 100) for run in runs)]
    names = [name for name in columns[0] if "old_held_out" in name][2::EACH]
    return grid(
        [[columns[0][name].control for name in names], *([one[name].result for name in names] for one in columns)]
    )


SECTIONS = [
    Section(
        "preservation",
        PRESERVATION,
        kept,
        {"PSNR, dB": 2, "change of old edits": 1, "of unedited images": 1},
        corner="`objective.preserve`",
        write=write_old,
        image=preservation_image,
        headers=[*OLD, "no edit"],
        labels=["control", "base", *(f"preserve: {label}" for label in PRESERVATION)],
    )
]
