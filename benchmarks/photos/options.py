"""Sections on single settings: the default run, recipes, rates, rank, precision, few pairs, adapters."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from benchmarks.photos.pairs import UNKNOWN, write_pairs
from benchmarks.photos.runs import Figures, Section, grid, last_row, samples, train
from lightning_modules.families.flux.module import FluxKontext
from lightning_modules.family import ATTENTION
from report.tables import read_validation


def of_edit(edit: str) -> list[str]:
    """Return the overrides that train on an edit."""
    return [f"data.root=WORK/{edit}/train.jsonl", f"data.val_root=WORK/{edit}/held_out.jsonl"]


def at_the_end(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR after the last step."""
    return [{"PSNR, dB": last_row(run)["psnr"]} for run in train(*overrides)]


# What `python train.py` has and the sweep sets otherwise, but for the scheduler: repairs keep the cosine.
DEFAULT = [
    "data.root=assets/sunset/train",
    "data.val_root=assets/sunset/held_out",
    "data.resolution=128",
    "optimizer.lr=${model.recipe.lr}",
    "trainer.max_steps=${model.recipe.max_steps}",
]
DEFAULT_ROW = [*DEFAULT, "scheduler=recipe"]
DEFAULT_COLUMNS = ("doing nothing", "before", "after", "images that stay")


def of_default(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR of held-out photographs: doing nothing, before the first step, after the last; then of others."""
    found = []
    for run in train(*overrides):
        first, last = (read_validation(run / "validation.csv")[index] for index in (0, -1))
        values = last["psnr_nothing"], first["psnr"], last["psnr"], last["psnr_staying"]
        found.append(dict(zip(DEFAULT_COLUMNS, values, strict=True)))
    return found


def sunset_image() -> Image.Image:
    """Return the held-out photographs as columns: photograph, result, target."""
    made = samples(train(*DEFAULT_ROW)[0], 100).values()
    return grid(list(zip(*made, strict=True)), enlarged=1)


# Recipes


def targets(names: tuple[str, ...]) -> str:
    """Return the override that adapts layers of these names."""
    return f"adapter.target_modules=[{','.join(names)}]"


RECIPES = {
    "former": [targets(ATTENTION), "scheduler=cosine"],
    "present": [targets(FluxKontext.layers.targets), "scheduler=constant", "model.timesteps.shift=dynamic"],
}
VAL_LOSS = "sunset, val_loss"


def on_each_edit(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR of each edit after the last step, and the validation loss of one."""
    columns = {edit: [last_row(run) for run in train(*overrides, *of_edit(edit))] for edit in UNKNOWN}
    return [
        {edit: columns[edit][seed]["psnr"] for edit in UNKNOWN} | {VAL_LOSS: columns["sunset"][seed]["val_loss"]}
        for seed in range(len(columns["sunset"]))
    ]


def recipes_image() -> Image.Image:
    """Return held-out images of each edit, as rows: control, former, present, target."""
    rows = []
    for edit in UNKNOWN:
        former, present = (samples(train(*RECIPES[name], *of_edit(edit))[0], 100) for name in RECIPES)
        for name in list(former)[2:4]:
            rows.append([former[name].control, former[name].result, present[name].result, former[name].target])
    return grid(rows)


MOMENTS = (25, 50, 75, 100)


def at_steps(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR along the run."""
    found = []
    for run in train("scheduler=constant", "sample_every=25", *overrides):
        rows = {row["step"]: row["psnr"] for row in read_validation(run / "validation.csv")}
        found.append({f"step {step}": rows[step] for step in MOMENTS})
    return found


# Precision

BASES = {
    name: ["model.dtype=bfloat16", *more]
    for name, more in {
        "bf16": [],
        **{name: [f"model/quantization={name}"] for name in ("fp8", "int8_w8a8", "nf4", "fp4")},
    }.items()
}
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

PAIRS = {"24 pairs": "train-24", "4 pairs": "train-4", "1 pair": "train-1"}


def of_few_pairs(overrides: Sequence[str]) -> list[Figures]:
    """Return the PSNR with each number of pairs."""
    columns = [train(*overrides, f"data.root=WORK/sunset/{name}.jsonl") for name in PAIRS.values()]
    return [
        {name: last_row(run)["psnr"] for name, run in zip(PAIRS, runs, strict=True)}
        for runs in zip(*columns, strict=True)
    ]


# Adapters of equal size

ADAPTERS = {
    "lora, rank 16": ["adapter=lora"],
    "dora, rank 16": ["adapter=dora"],
    "loha, rank 8": ["adapter=loha"],
    "lokr, factor 2, rank 32": ["adapter=lokr", "adapter.decompose_factor=2", "adapter.rank=32"],
}


def at_the_best_rate(overrides: Sequence[str]) -> list[Figures]:
    """Return figures at the learning rate, of four, with the highest held-out PSNR of the first seed."""

    def first(rate: str) -> float:
        return last_row(train(*overrides, f"optimizer.lr={rate}", seeds=[1])[0])["psnr"]

    best = max(("1.5e-3", "5e-3", "1.5e-2", "5e-2"), key=first)
    found = []
    for run in train(*overrides, f"optimizer.lr={best}"):
        checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")
        parameters = sum(tensor.numel() for tensor in checkpoint["state_dict"].values())
        found.append({"learning rate": float(best), "parameters": parameters, "PSNR, dB": last_row(run)["psnr"]})
    return found


SECTIONS = [
    Section(
        "sunset",
        {"`python train.py`": DEFAULT_ROW},
        of_default,
        dict.fromkeys(DEFAULT_COLUMNS, 1),
        corner="PSNR, dB",
        image=sunset_image,
        headers=("make it a sunset",),
        labels=("photograph", "LoRA", "target"),
    ),
    Section(
        "recipes",
        RECIPES,
        on_each_edit,
        {**dict.fromkeys(UNKNOWN, 2), VAL_LOSS: 3},
        write=write_pairs,
        image=recipes_image,
        headers=("control", *RECIPES, "target"),
        labels=list(UNKNOWN),
    ),
    Section(
        "rates",
        {rate: [f"optimizer.lr={rate}"] for rate in ("1.5e-3", "5e-3", "1.5e-2", "5e-2")},
        at_steps,
        {f"step {step}": 2 for step in MOMENTS},
        corner="learning rate",
        write=write_pairs,
    ),
    Section(
        "rank",
        {str(rank): [f"adapter.rank={rank}"] for rank in (4, 16, 64)},
        at_the_end,
        {"PSNR, dB": 2},
        corner="`adapter.rank`",
        write=write_pairs,
    ),
    Section(
        "precision",
        BASES,
        on_bases,
        dict.fromkeys((TRAINED_AND_USED, TRAINED_ON_BF16, USED_ON_BF16), 2),
        corner="format",
        write=write_pairs,
    ),
    Section(
        "pairs",
        {f"`{name}`": [f"adapter={name}"] for name in ("lora", "tlora", "ortho_tlora")},
        of_few_pairs,
        dict.fromkeys(PAIRS, 2),
        write=write_pairs,
    ),
    Section(
        "adapters",
        ADAPTERS,
        at_the_best_rate,
        {"learning rate": 4, "parameters": 0, "PSNR, dB": 2},
        write=write_pairs,
    ),
]
