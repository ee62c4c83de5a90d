"""Measure what docs/quality.md reports: runs on Shapes that differ in one setting, with three seeds each.

    python benchmarks/quality.py rank [--seeds 3] [--steps 100]
    python benchmarks/quality.py objectives --images docs

Each run is `python train.py` with the overrides below. Figures are the mean and standard deviation over the seeds, on
16 held-out images. In a row of two bases the LoRA is trained on the first and measured on the second.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.adapters import adapters, averages
from benchmarks.preservation import preservation, small_edit
from benchmarks.shapes_runs import PAIRS, Rows, draw_pairs, run, table
from benchmarks.sliders import slider
from lightning_modules.families.flux.module import FluxKontext
from lightning_modules.family import ATTENTION
from report.tables import read_metrics, read_validation

COLUMNS = ("mask_iou", "psnr", "best_psnr", "ssim", "val_loss", "train_loss", "seconds")
BASES = {
    "float32": [],
    "bf16": ["model.dtype=bfloat16"],
    **{name: ["model.dtype=bfloat16", f"model/quantization={name}"] for name in ("fp8", "int8_w8a8", "nf4", "fp4")},
}
BASES["int8_w8a8, not rotated"] = [*BASES["int8_w8a8"], "model.quantization.rotation=false"]
# Overrides of each row, and for a LoRA that moves to another base the overrides of that base.
SETS: dict[str, dict[str, list[list[str]]]] = {
    "rank": {"rank 4": [["adapter.rank=4"]], "rank 16": [[]], "rank 64": [["adapter.rank=64"]]},
    "precision": {name: [overrides] for name, overrides in BASES.items()},
    "moved": {
        f"{one}, then {other}": [BASES[one], BASES[other]]
        for small in ("fp8", "int8_w8a8", "nf4", "fp4")
        for one, other in (("bf16", small), (small, "bf16"))
    },
    "pairs": {
        f"{adapter}, {pairs} pairs": [[f"adapter={adapter}", f"data.root=PAIRS/train-{pairs}.jsonl", "sample_every=20"]]
        for pairs in PAIRS
        for adapter in ("lora", "tlora", "ortho_tlora")
    },
    "data": {"cached": [[]], "encoded in every step": [["data.cache_dir=null"]]},
    "timesteps": {
        "logit_normal": [[]],
        "uniform": [["model.timesteps.law=uniform"]],
        "mode": [["model.timesteps.law=mode"]],
        "towards noise": [["model.timesteps.logit_mean=0.7", "model.timesteps.logit_std=1.2"]],
    },
}


def targets(names: tuple[str, ...]) -> str:
    """Return the override that adapts layers of these names."""
    return f"adapter.target_modules=[{','.join(names)}]"


FORMER = [targets(ATTENTION), "scheduler=cosine"]
PRESENT = [targets(FluxKontext.layers.targets), "scheduler=constant", "model.timesteps.shift=dynamic"]
RECIPES = {
    "former": FORMER,
    "layers": [targets(FluxKontext.layers.targets), "scheduler=cosine"],
    "shift dynamic": [*FORMER, "model.timesteps.shift=dynamic"],
    "schedule constant": [targets(ATTENTION), "scheduler=constant"],
    "all three": PRESENT,
    **{f"all three, rate {rate}": [*PRESENT, f"optimizer.lr={rate}"] for rate in ("1.5e-3", "1.5e-2", "5e-2")},
}


def measure(
    pairs: Path, steps: int, seed: int, overrides: list[str], moved_to: list[str] | None = None
) -> dict[str, float]:
    """Return the last row of a run's validation.csv, or the first row of a run on another base with its LoRA."""
    output, seconds = run(pairs, steps, f"seed={seed}", *overrides)
    if moved_to is not None:
        output, _ = run(pairs, 1, f"seed={seed}", *moved_to, f"adapter.init_from={output}")
        row = read_validation(output / "validation.csv")[0]
    else:
        rows = read_validation(output / "validation.csv")
        loss = float(read_metrics(output / "metrics.csv")[-1]["loss_avg"])
        best = max(row["psnr"] for row in rows)  # above the last one if the run was too long
        row = rows[-1] | {"best_psnr": best, "train_loss": loss, "seconds": seconds}
    return {column: row[column] for column in COLUMNS if column in row}


def compare(pairs: Path, steps: int, seeds: range, name: str) -> None:
    """Print the table of one of SETS."""
    rows: Rows = ((row, [measure(pairs, steps, seed, *runs) for seed in seeds]) for row, runs in SETS[name].items())
    table(name, rows)


def recipes(pairs: Path, steps: int, seeds: range, images: Path | None) -> None:
    """Print PSNR and validation loss of former and present defaults of large models, edit by edit."""

    def measured(folder: Path, seed: int, overrides: list[str]) -> dict[str, float]:
        output, _ = run(folder, steps, f"seed={seed}", "sample_every=30", *overrides)
        rows = read_validation(output / "validation.csv")
        return {**{f"PSNR at {row['step']:.0f}": row["psnr"] for row in rows[1:]}, "val_loss": rows[-1]["val_loss"]}

    for edit in ("segment", "invert", "mirror"):
        folder = pairs / edit
        draw_pairs(folder, edit)
        table(edit, ((name, [measured(folder, seed, recipe) for seed in seeds]) for name, recipe in RECIPES.items()))


# Each function of `objectives` draws its own data and prints its table.
OBJECTIVES = {one.__name__: one for one in (preservation, small_edit, averages, adapters, slider)}
FUNCTIONS = OBJECTIVES | {"recipes": recipes}


def main() -> None:
    """Run the sets that are named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=[*SETS, *FUNCTIONS, "objectives"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--images", type=Path, help="folder for the images of docs/quality.md")
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    with tempfile.TemporaryDirectory() as temporary:
        pairs = Path(temporary)
        draw_pairs(pairs)
        for name in [one for chosen in options.sets for one in (OBJECTIVES if chosen == "objectives" else [chosen])]:
            if name in SETS:
                compare(pairs, options.steps, seeds, name)
            else:
                FUNCTIONS[name](pairs, options.steps, seeds, options.images)


if __name__ == "__main__":
    main()
