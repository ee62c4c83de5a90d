"""What docs/quality.md says: runs on Shapes that differ in one thing, three seeds each.

    python benchmarks/quality.py rank [--seeds 3] [--steps 100]

Every run is `python train.py` with the overrides that are printed. Figures are of 16 held-out pictures, mean and
standard deviation over the seeds.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from callbacks.validation import read_rows
from datamodules.shapes import write_pairs
from datamodules.sources import TABLES

ROOT = Path(__file__).parent.parent
COMMON = [
    "data=cached",
    "data.root=PAIRS/train-24.jsonl",
    "data.val_root=PAIRS/held_out.jsonl",
    "data.cache_dir=PAIRS/cache",
    "data.batch_size=16",
    "data.caption_dropout_rate=0",
    "adapter.target_modules=all-linear",
    "optimizer.lr=5e-3",
    "sample_every=0",
    "logger=none",
    "callbacks.sample_images.count=16",
    "+callbacks.validation.metrics.mask_iou._target_=callbacks.image_metrics.MaskIoU",
]
PAIRS, HELD_OUT = (24, 4, 1), 16
SETS: dict[str, dict[str, list[str]]] = {
    "rank": {f"rank {rank}": [f"adapter.rank={rank}"] for rank in (4, 16, 64)},
    "precision": {
        "float32": [],
        "bf16": ["model.dtype=bfloat16"],
        **{
            name: ["model.dtype=bfloat16", f"model/quantization={group}", f"model.quantization.format={name}"]
            for name, group in (("fp8", "fp8"), ("int8", "fp8"), ("nf4", "fp4"), ("fp4", "fp4"))
        },
    },
    "pairs": {
        f"{adapter}, {pairs} pairs": [f"adapter={adapter}", f"data.root=PAIRS/train-{pairs}.jsonl"]
        for pairs in PAIRS
        for adapter in ("lora", "tlora", "ortho_tlora")
    },
    "data": {"cached": [], "encoded in every step": ["data.cache_dir=null"]},
    "timesteps": {
        "logit_normal": [],
        "uniform": ["model.timesteps.law=uniform"],
        "mode": ["model.timesteps.law=mode"],
        "towards noise": ["model.timesteps.logit_mean=0.7", "model.timesteps.logit_std=1.2"],
    },
}


def draw_pairs(folder: Path, edit: str) -> None:
    """24 pairs and 16 held out, and tables of fewer, whose rows repeat so that batches are as large."""
    write_pairs(folder, [edit], PAIRS[0] + HELD_OUT, seed=0, change_weight=1)
    rows = (folder / TABLES[0]).read_text().splitlines()
    for name, some in [("held_out", rows[PAIRS[0] :])] + [(f"train-{n}", rows[:n] * (PAIRS[0] // n)) for n in PAIRS]:
        (folder / f"{name}.jsonl").write_text("\n".join(some))


def measure(pairs: Path, overrides: list[str], seed: int, steps: int, folder: Path) -> dict[str, float]:
    """The last row of a run's validation.csv, and its seconds."""
    command = [sys.executable, "train.py", *COMMON, f"seed={seed}", f"trainer.max_steps={steps}", *overrides]
    command += [f"output_dir={folder}"]
    command = [part.replace("PAIRS", str(pairs)) for part in command]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return read_rows(folder / "validation.csv")[-1] | {"seconds": time.perf_counter() - start}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--edit", default="segment")
    options = parser.parse_args()
    pairs = Path(tempfile.mkdtemp())
    draw_pairs(pairs, options.edit)
    columns = ["mask_iou", "psnr", "ssim", "val_loss", "seconds"]
    if options.edit != "segment":
        columns.remove("mask_iou")
    for name in options.sets:
        print(f"| {name} | {' | '.join(columns)} |")
        print(f"|---|{'---|' * len(columns)}", flush=True)
        for label, overrides in SETS[name].items():
            rows = []
            for seed in range(1, options.seeds + 1):
                with tempfile.TemporaryDirectory() as temporary:
                    rows.append(measure(pairs, overrides, seed, options.steps, Path(temporary) / "run"))
            cells = []
            for column in columns:
                values = [row[column] for row in rows]
                spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.4g}{spread}")
            print(f"| {label} | {' | '.join(cells)} |  `{' '.join(overrides)}`", flush=True)


if __name__ == "__main__":
    main()
