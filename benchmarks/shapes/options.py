"""Sections about single settings: the default run, recipes, rank, precision, and the number of pairs."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from benchmarks.shapes.runs import Figures, Section, draw_pairs, grid, last_row, samples, train
from lightning_modules.families.flux.module import FluxKontext
from lightning_modules.family import ATTENTION
from report.tables import read_validation

PSNR = {"PSNR, dB": 2}


def quality_of(overrides: Sequence[str]) -> list[Figures]:
    """Return mask IoU and PSNR after the last step."""
    rows = [last_row(run) for run in train(*overrides)]
    return [{"mask IoU": row["mask_iou"], "PSNR, dB": row["psnr"]} for row in rows]


# The default run: every setting that the sweep sets otherwise is that of `python train.py` again.
DEFAULT = ["trainer.max_steps=600", "optimizer.lr=3e-3"]


def along_the_run(overrides: Sequence[str]) -> list[Figures]:
    """Return mask IoU and PSNR before the first step and after the last."""
    found = []
    for run in train(*overrides):
        first, last = (read_validation(run / "validation.csv")[index] for index in (0, -1))
        found.append(
            {
                "mask IoU before": first["mask_iou"],
                "mask IoU": last["mask_iou"],
                "PSNR before, dB": first["psnr"],
                "PSNR, dB": last["psnr"],
            }
        )
    return found


# Recipes


def targets(names: tuple[str, ...]) -> str:
    """Return the override that adapts layers of these names."""
    return f"adapter.target_modules=[{','.join(names)}]"


FORMER = [targets(ATTENTION), "scheduler=cosine"]
PRESENT = [targets(FluxKontext.layers.targets), "scheduler=constant", "model.timesteps.shift=dynamic"]
RECIPES = {
    "former": FORMER,
    "attention of image and text, and MLPs": [targets(FluxKontext.layers.targets), "scheduler=cosine"],
    "`shift=dynamic` (1.6 at 64x64)": [*FORMER, "model.timesteps.shift=dynamic"],
    "`scheduler=constant`": [targets(ATTENTION), "scheduler=constant"],
    "all three": PRESENT,
}
TAUGHT = ("segment", "invert", "mirror")
VAL_LOSS = "invert, val_loss"


def of_edit(edit: str) -> list[str]:
    """Return the overrides that train on an edit."""
    return [f"data.root=WORK/{edit}/train.jsonl", f"data.val_root=WORK/{edit}/held_out.jsonl"]


def on_each_edit(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR of each edit after the last step, and the validation loss of one."""
    columns = [[last_row(run) for run in train(*overrides, *of_edit(edit))] for edit in TAUGHT]
    return [
        {edit: row["psnr"] for edit, row in zip(TAUGHT, rows, strict=True)} | {VAL_LOSS: rows[1]["val_loss"]}
        for rows in zip(*columns, strict=True)
    ]


def recipes_image() -> Image.Image:
    """Return held-out images of each edit, as rows: control, former, all three, target."""
    rows = []
    for edit in TAUGHT:
        former, present = (samples(train(*RECIPES[name], *of_edit(edit))[0], 100) for name in ("former", "all three"))
        for name in list(former)[:2]:
            rows.append([former[name].control, former[name].result, present[name].result, former[name].target])
    return grid(rows)


MOMENTS = (25, 50, 75, 100)


def at_steps(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR of invert along the run."""
    found = []
    for run in train(*PRESENT, *of_edit("invert"), "sample_every=25", *overrides):
        rows = {row["step"]: row["psnr"] for row in read_validation(run / "validation.csv")}
        found.append({f"step {step}": rows[step] for step in MOMENTS})
    return found


# Precision

BASES = {
    "bf16": ["model.dtype=bfloat16"],
    **{name: ["model.dtype=bfloat16", f"model/quantization={name}"] for name in ("fp8", "int8_w8a8", "nf4", "fp4")},
}
BASES["int8_w8a8, `rotation=false`"] = [*BASES["int8_w8a8"], "model.quantization.rotation=false"]
TRAINED_AND_USED, TRAINED_ON_BF16, USED_ON_BF16 = (
    "trained and used on it",
    "trained on bf16, used on it",
    "trained on it, used on bf16",
)


def on_bases(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR of a LoRA trained and used on a base, and where one of the two is in bf16."""
    found = []
    own, plain = train(*overrides), train(*BASES["bf16"])
    for seed, (mine, other) in enumerate(zip(own, plain, strict=True), start=1):
        moved = [moved_to(overrides, other, seed), moved_to(BASES["bf16"], mine, seed)]
        headers = TRAINED_AND_USED, TRAINED_ON_BF16, USED_ON_BF16
        found.append(dict(zip(headers, (last_row(mine)["psnr"], *moved), strict=True)))
    return found


def moved_to(base: Sequence[str], run: Path, seed: int) -> float:
    """Return the PSNR of a run's LoRA on another base, before the first step of a run from it."""
    [made] = train(*base, f"adapter.init_from={run}", "trainer.max_steps=1", seeds=[seed])
    return read_validation(made / "validation.csv")[0]["psnr"]


# Few pairs

PAIRS = {"24 pairs": "train", "4 pairs": "train-4", "1 pair": "train-1"}


def of_few_pairs(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR with each number of pairs."""
    columns = [train(*overrides, f"data.root=WORK/segment/{name}.jsonl") for name in PAIRS.values()]
    return [
        {name: last_row(run)["psnr"] for name, run in zip(PAIRS, runs, strict=True)}
        for runs in zip(*columns, strict=True)
    ]


def draw_taught() -> None:
    """Draw the pairs of the edits."""
    for edit in TAUGHT:
        draw_pairs(edit)


SECTIONS = [
    Section(
        "default",
        {"`python train.py`": DEFAULT},
        along_the_run,
        {"mask IoU before": 3, "mask IoU": 3, "PSNR before, dB": 1, "PSNR, dB": 2},
        draw=draw_pairs,
    ),
    Section(
        "recipes",
        RECIPES,
        on_each_edit,
        {**dict.fromkeys(TAUGHT, 2), VAL_LOSS: 3},
        draw=draw_taught,
        image=recipes_image,
        headers=("control", "former", "all three", "target"),
        labels=TAUGHT,
    ),
    Section(
        "rates",
        {rate: [f"optimizer.lr={rate}"] for rate in ("1.5e-3", "5e-3", "1.5e-2", "5e-2")},
        at_steps,
        {f"step {step}": 2 for step in MOMENTS},
        corner="learning rate",
        draw=draw_taught,
    ),
    Section(
        "rank",
        {str(rank): [f"adapter.rank={rank}"] for rank in (4, 16, 64)},
        quality_of,
        {"mask IoU": 3, "PSNR, dB": 2},
        corner="`adapter.rank`",
        draw=draw_pairs,
    ),
    Section(
        "precision",
        BASES,
        on_bases,
        dict.fromkeys((TRAINED_AND_USED, TRAINED_ON_BF16, USED_ON_BF16), 2),
        corner="format",
        draw=draw_pairs,
    ),
    Section(
        "pairs",
        {f"`{name}`": [f"adapter={name}"] for name in ("lora", "tlora", "ortho_tlora")},
        of_few_pairs,
        dict.fromkeys(PAIRS, 2),
        draw=draw_pairs,
    ),
]
