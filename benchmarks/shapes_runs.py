"""Train on Shapes, read the sample images, and print tables; shared by the parts of quality.py."""

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from datamodules.images.shapes import write_pairs
from datamodules.images.tables import COLUMNS, TABLES
from report.images import PARTS

# The name of a row, and the measurements with each seed.
Rows = Iterator[tuple[str, list[dict[str, float]]]]
ROOT = Path(__file__).parent.parent
PAIRS, HELD_OUT = (24, 4, 1), 16  # numbers of training pairs; each table repeats its rows, so batches are equally large
COMMON = [
    "data=cached",
    "data.root=PAIRS/train-24.jsonl",
    "data.val_root=PAIRS/held_out.jsonl",
    "data.cache_dir=PAIRS/cache",
    "data.batch_size=16",
    "data.caption_dropout_rate=0",
    "model.gradient_checkpointing=none",
    "adapter.target_modules=all-linear",
    "optimizer.lr=5e-3",
    "scheduler=cosine",
    "sample_every=0",
    "logger=none",
    "callbacks.sample_images.count=16",
    "+callbacks.validation.metrics.mask_iou._target_=report.image_metrics.MaskIoU",
]


def draw_pairs(folder: Path, edit: str = "segment") -> None:
    """Draw pairs of an edit into a folder, with a table for each number of training pairs and one of held-out pairs."""
    folder.mkdir(exist_ok=True)
    write_pairs(folder, [edit], PAIRS[0] + HELD_OUT, seed=0, change_weight=1)
    rows = (folder / TABLES[0]).read_text().splitlines()
    (folder / "held_out.jsonl").write_text("\n".join(rows[PAIRS[0] :]))
    for count in PAIRS:
        (folder / f"train-{count}.jsonl").write_text("\n".join(rows[:count] * (PAIRS[0] // count)))


@functools.cache
def run(pairs: Path, steps: int, *overrides: str) -> tuple[Path, float]:
    """Run train.py once for each combination of settings, next to the pairs; return its folder and seconds."""
    output = Path(tempfile.mkdtemp(dir=pairs)) / "run"
    start = time.perf_counter()
    command(pairs, "train.py", *COMMON, f"trainer.max_steps={steps}", *overrides, f"output_dir={output}")
    return output, time.perf_counter() - start


def command(pairs: Path, *parts: str) -> None:
    """Run a command of the repository; PAIRS in its settings stands for the folder of the pairs."""
    line = [sys.executable, *(part.replace("PAIRS", str(pairs)) for part in parts)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


class Made(NamedTuple):
    """The parts of a sample image, each (H, W, 3) in [0, 255]."""

    control: np.ndarray
    result: np.ndarray
    target: np.ndarray


def samples(output: Path, step: int) -> dict[str, Made]:
    """Read the sample images of a step of a run, by name."""
    found = {}
    for path in sorted((output / "samples" / f"step-{step:06d}").glob("*.png")):
        with Image.open(path) as strip:
            widths = [int(width) for width in str(strip.info[PARTS]).split()]
            parts = np.split(np.asarray(strip.convert("RGB"), dtype=np.float32), np.cumsum(widths)[:-1], axis=1)
        found[path.stem] = Made(*parts)
    return found


def distance(one: np.ndarray, other: np.ndarray, where: np.ndarray | None = None) -> float:
    """Return the root mean square difference of two images in levels of 255, only at the positions in `where`."""
    square = np.square(one - other).mean(axis=-1)
    return float(np.sqrt(square.mean() if where is None else square[where].mean()))


def table(title: str, rows: Rows) -> None:
    """Print means and standard deviations over the seeds, row by row."""
    columns: list[str] = []
    for label, values in rows:
        if not columns:
            columns = list(values[0])
            print(f"| {title} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        cells = []
        for column in columns:
            seeds = [row[column] for row in values]
            spread = f" ± {statistics.stdev(seeds):.2g}" if len(seeds) > 1 else ""
            cells.append(f"{statistics.fmean(seeds):.4g}{spread}")
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def write_table(folder: Path, rows: Sequence[tuple[Image.Image, Image.Image, str]], train: int) -> None:
    """Write pairs (control, target, instruction): the first `train` for training, the rest held out."""
    folder.mkdir()
    lines = []
    for index, (control, target, prompt) in enumerate(rows):
        names = f"{index:03d}-after.png", f"{index:03d}-before.png"
        target.save(folder / names[0])
        control.save(folder / names[1])
        lines.append(json.dumps(dict(zip((COLUMNS["target"], COLUMNS["control"]), names, strict=True), prompt=prompt)))
    for name, some in (("train", lines[:train]), ("held_out", lines[train:])):
        (folder / f"{name}.jsonl").write_text("\n".join(some))


def save_grid(rows: Sequence[Sequence[np.ndarray]], path: Path, enlarged: int = 2) -> None:
    """Save rows of images as one image, with a pixel of grey between them."""
    padded = [[np.pad(one, ((0, 1), (0, 1), (0, 0)), constant_values=128) for one in row] for row in rows]
    grid = np.concatenate([np.concatenate(row, axis=1) for row in padded]).round().astype("uint8")
    image = Image.fromarray(grid)
    image.resize((image.width * enlarged, image.height * enlarged), Image.Resampling.NEAREST).save(path, optimize=True)
