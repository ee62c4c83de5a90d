"""Runs of train.py on Shapes, and the pictures that they made."""

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

from datamodules.images.tables import COLUMNS
from report.images import PARTS

# A row's name, and what was measured with each seed.
Rows = Iterator[tuple[str, list[dict[str, float]]]]
ROOT = Path(__file__).parent.parent
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


@functools.cache
def run(pairs: Path, steps: int, *overrides: str) -> tuple[Path, float]:
    """A run of train.py, made once, in a folder beside the pairs; gives its folder, and its seconds."""
    output = Path(tempfile.mkdtemp(dir=pairs)) / "run"
    start = time.perf_counter()
    command(pairs, "train.py", *COMMON, f"trainer.max_steps={steps}", *overrides, f"output_dir={output}")
    return output, time.perf_counter() - start


def command(pairs: Path, *parts: str) -> None:
    """One of the repository's commands; PAIRS in its settings is the pairs' folder."""
    line = [sys.executable, *(part.replace("PAIRS", str(pairs)) for part in parts)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


class Made(NamedTuple):
    """The parts of a sample picture, each (H, W, 3), numbers from 0 to 255."""

    control: np.ndarray
    result: np.ndarray
    target: np.ndarray


def samples(output: Path, step: int) -> dict[str, Made]:
    """The sample pictures of a run's step, by name."""
    found = {}
    for path in sorted((output / "samples" / f"step-{step:06d}").glob("*.png")):
        with Image.open(path) as strip:
            widths = [int(width) for width in str(strip.info[PARTS]).split()]
            parts = np.split(np.asarray(strip.convert("RGB"), dtype=np.float32), np.cumsum(widths)[:-1], axis=1)
        found[path.stem] = Made(*parts)
    return found


def distance(one: np.ndarray, other: np.ndarray, where: np.ndarray | None = None) -> float:
    """Root mean square of the differences of two pictures, in levels of 255; of the places in `where` alone."""
    square = np.square(one - other).mean(axis=-1)
    return float(np.sqrt(square.mean() if where is None else square[where].mean()))


def table(title: str, rows: Rows) -> None:
    """Print a table as its rows come: means and standard deviations over the seeds."""
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
    """Pairs of pictures and their instructions: the first `train` to learn from, the rest held out."""
    folder.mkdir()
    lines = []
    for number, (control, target, prompt) in enumerate(rows):
        names = f"{number:03d}-after.png", f"{number:03d}-before.png"
        for picture, name in zip((target, control), names, strict=True):
            picture.save(folder / name)
        lines.append(json.dumps(dict(zip((COLUMNS["target"], COLUMNS["control"]), names, strict=True), prompt=prompt)))
    for name, some in (("train", lines[:train]), ("held_out", lines[train:])):
        (folder / f"{name}.jsonl").write_text("\n".join(some))


def save_grid(rows: Sequence[Sequence[np.ndarray]], path: Path, enlarged: int = 2) -> None:
    """Pictures in rows, with a pixel of grey between them."""
    padded = [[np.pad(one, ((0, 1), (0, 1), (0, 0)), constant_values=128) for one in row] for row in rows]
    grid = np.concatenate([np.concatenate(row, axis=1) for row in padded]).round().astype("uint8")
    image = Image.fromarray(grid)
    image.resize((image.width * enlarged, image.height * enlarged), Image.Resampling.NEAREST).save(path, optimize=True)
