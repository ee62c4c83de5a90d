"""What docs/quality.md says: runs on Shapes that differ in one thing, three seeds each.

    python benchmarks/quality.py rank [--seeds 3] [--steps 100]
    python benchmarks/quality.py objectives --images docs

Every run is `python train.py` with the overrides that stand here. Figures are of 16 held-out pictures, mean and
standard deviation over the seeds. Where a row names two bases, the LoRA is trained on the first and measured on the
second.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.adapters import adapters, averages
from benchmarks.preservation import preservation, small_edit
from benchmarks.recipes import recipes
from benchmarks.shapes_runs import run, table
from benchmarks.sliders import slider
from datamodules.images.shapes import write_pairs
from datamodules.images.tables import TABLES
from report.tables import read_metrics, read_rows

COLUMNS = ("mask_iou", "psnr", "best_psnr", "ssim", "val_loss", "train_loss", "seconds")
PAIRS, HELD_OUT = (24, 4, 1), 16
BASES = {
    "float32": [],
    "bf16": ["model.dtype=bfloat16"],
    **{
        name: ["model.dtype=bfloat16", f"model/quantization={group}", f"model.quantization.format={name}"]
        for name, group in (("fp8", "fp8"), ("int8", "fp8"), ("nf4", "fp4"), ("fp4", "fp4"))
    },
}
# Of each row the overrides; for a LoRA that moves to another base, those of that base too.
SETS: dict[str, dict[str, list[list[str]]]] = {
    "rank": {"rank 4": [["adapter.rank=4"]], "rank 16": [[]], "rank 64": [["adapter.rank=64"]]},
    "precision": {name: [overrides] for name, overrides in BASES.items()},
    "moved": {
        f"{one}, then {other}": [BASES[one], BASES[other]]
        for small in ("fp8", "int8", "nf4", "fp4")
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

# The sets of `objectives`: each draws what it needs, and prints its table.
OBJECTIVES = {one.__name__: one for one in (preservation, small_edit, averages, adapters, slider, recipes)}


def draw_pairs(folder: Path) -> None:
    """24 pairs and 16 held out, and tables of fewer, whose rows repeat so that batches are as large."""
    write_pairs(folder, ["segment"], PAIRS[0] + HELD_OUT, seed=0, change_weight=1)
    rows = (folder / TABLES[0]).read_text().splitlines()
    for name, some in [("held_out", rows[PAIRS[0] :])] + [(f"train-{n}", rows[:n] * (PAIRS[0] // n)) for n in PAIRS]:
        (folder / f"{name}.jsonl").write_text("\n".join(some))


def measure(
    pairs: Path, steps: int, seed: int, overrides: list[str], moved_to: list[str] | None = None
) -> dict[str, float]:
    """The last row of a run's validation.csv, or the first one of a run that starts from its LoRA elsewhere."""
    output, seconds = run(pairs, steps, f"seed={seed}", *overrides)
    if moved_to is not None:
        moved, _ = run(pairs, 1, f"seed={seed}", *moved_to, f"adapter.init_from={output}")
        return read_rows(moved / "validation.csv")[0]
    rows = read_rows(output / "validation.csv")
    best = max(row["psnr"] for row in rows)  # higher than the last one where it was learned too long
    loss = float(read_metrics(output / "metrics.csv")[-1]["loss_avg"])
    return rows[-1] | {"best_psnr": best, "train_loss": loss, "seconds": seconds}


def rows(pairs: Path, steps: int, seeds: range, name: str) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Of one of SETS, what was measured with each seed."""
    for label, (overrides, *then) in SETS[name].items():
        measured = [measure(pairs, steps, seed, overrides, *then) for seed in seeds]
        yield label, [{column: row[column] for column in COLUMNS if column in row} for row in measured]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=[*SETS, *OBJECTIVES, "objectives"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--images", type=Path, help="folder for the images of docs/quality.md")
    options = parser.parse_args()
    names = [one for name in options.sets for one in (OBJECTIVES if name == "objectives" else [name])]
    seeds = range(1, options.seeds + 1)
    with tempfile.TemporaryDirectory() as temporary:
        pairs = Path(temporary)
        draw_pairs(pairs)
        for name in names:
            if name in SETS:
                table(name, rows(pairs, options.steps, seeds, name))
            else:
                OBJECTIVES[name](pairs, options.steps, seeds, options.images)


if __name__ == "__main__":
    main()
