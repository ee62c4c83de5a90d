"""What docs/quality.md says: runs on Shapes that differ in one thing, three seeds each.

    python benchmarks/quality.py rank [--seeds 3] [--steps 100]

Every run is `python train.py` with the overrides that are printed. Figures are of 16 held-out pictures, mean and
standard deviation over the seeds. Where a row names two bases, the LoRA is trained on the first and measured on the
second.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from callbacks.report.figures import read_metrics, read_rows
from datamodules.images.shapes import write_pairs
from datamodules.images.sources import TABLES

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


def draw_pairs(folder: Path) -> None:
    """24 pairs and 16 held out, and tables of fewer, whose rows repeat so that batches are as large."""
    write_pairs(folder, ["segment"], PAIRS[0] + HELD_OUT, seed=0, change_weight=1)
    rows = (folder / TABLES[0]).read_text().splitlines()
    for name, some in [("held_out", rows[PAIRS[0] :])] + [(f"train-{n}", rows[:n] * (PAIRS[0] // n)) for n in PAIRS]:
        (folder / f"{name}.jsonl").write_text("\n".join(some))


@functools.cache
def run(pairs: Path, steps: int, *overrides: str) -> tuple[Path, float]:
    """A run of train.py, made once, in a folder beside the pairs; gives its folder, and its seconds."""
    output = Path(tempfile.mkdtemp(dir=pairs)) / "run"
    command = [sys.executable, "train.py", *COMMON, f"trainer.max_steps={steps}", *overrides, f"output_dir={output}"]
    command = [part.replace("PAIRS", str(pairs)) for part in command]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return output, time.perf_counter() - start


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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        pairs = Path(temporary)
        draw_pairs(pairs)
        for name in options.sets:
            columns: list[str] = []
            for label, (overrides, *then) in SETS[name].items():
                seeds = range(1, options.seeds + 1)
                rows = [measure(pairs, options.steps, seed, overrides, *then) for seed in seeds]
                if not columns:
                    columns = [column for column in COLUMNS if column in rows[0]]
                    print(f"| {name} | {' | '.join(columns)} |")
                    print(f"|---|{'---|' * len(columns)}")
                cells = []
                for column in columns:
                    values = [row[column] for row in rows]
                    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
                    cells.append(f"{statistics.fmean(values):.4g}{spread}")
                print(f"| {label} | {' | '.join(cells)} |  `{' '.join(overrides)}`", flush=True)


if __name__ == "__main__":
    main()
