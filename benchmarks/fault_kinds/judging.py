"""Compare the output of commands with that of undisturbed ones, to the bit; functions return the differences."""

import csv
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from foundation.files import file_sha256

# Of metrics.csv; the others are times, rates and memory, and a mean that is resumed from six digits.
COLUMNS = ("step", "loss", "grad_norm", "lr")
WEIGHTS = "pytorch_lora_weights.safetensors"
Content = dict[str, tuple[dict[str, Any], bytes]]


class BadError(Exception):
    """A round with a wrong end."""


def rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cache_folder(cache_dir: Path) -> Path:
    """Return the only cache in a cache_dir."""
    found = [path.parent for path in cache_dir.glob("*/manifest.json")]
    if len(found) != 1:
        raise BadError(f"{len(found)} finished caches in {cache_dir}")
    return found[0]


def cache_content(folder: Path) -> Content:
    """Read the facts and the bytes of each sample and prompt in a cache, by id.

    Raises:
        BadError: the files do not match, or the build left temporary files.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    left = [path.name for pattern in (".*.tmp", ".lock") for path in folder.glob(pattern)]
    if left:
        raise BadError(f"{left} is left in {folder}")
    tars, parts = (sorted(path.stem for path in folder.glob(f"latents-*.{end}")) for end in ("tar", "jsonl"))
    if not tars == parts == sorted(Path(name).stem for name in manifest["shards"]):
        raise BadError(f"{tars}, {parts} and manifest.json differ")
    content: Content = {}
    lines = (line for path in folder.glob("latents-*.jsonl") for line in path.read_text().splitlines()[1:])
    for row in map(json.loads, lines):
        with (folder / row["shard"]).open("rb") as file:
            file.seek(row["offset"])
            data = file.read(row["bytes"])
        if zlib.crc32(data) != row["crc32"]:
            raise BadError(f"{row['id']} in {row['shard']} is not what its index says")
        if "key" in row and row["id"] in content:
            raise BadError(f"{row['id']} is in the cache twice")
        content[row["id"]] = {k: v for k, v in row.items() if k not in ("shard", "offset")}, data
    if manifest["samples"] != sum("key" in facts for facts, _ in content.values()):
        raise BadError(f"{folder / 'manifest.json'} counts {manifest['samples']} samples")
    for name, facts in manifest["shards"].items():
        if facts["sha256"] != file_sha256(folder / name):
            raise BadError(f"{folder / name} is not what manifest.json says")
    return content


def cache_differences(one: Path, other: Path) -> list[str]:
    """Return the differences between two cache_dirs."""
    first, second = (cache_content(cache_folder(path)) for path in (one, other))
    lost, new = sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())
    changed = [id for id in first.keys() & second.keys() if first[id] != second[id]]
    found = {"lacks": lost, "has besides": new, "has otherwise": changed}
    return [f"the cache {what} {ids}" for what, ids in found.items() if ids]


def checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint without the loggers' count of batches, which each resumed run leaves one lower."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    del content["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
    return content


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint, or None if it is missing or damaged."""
    try:
        return int(torch.load(path, weights_only=True)["global_step"])
    except Exception:  # whatever a damaged file makes of it
        return None


def equal(one: Any, other: Any) -> bool:
    """Return whether nested values are equal, tensors to the bit."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return same and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(equal, one, other))
    return bool(one == other)


def run_differences(one: Path, other: Path) -> list[str]:
    """Return the differences between an undisturbed run and another, which may have saved more often."""
    wrong = [name for name in sorted(weights_of(one)) if not same_file(one / name, other / name)]
    for name in ("validation.csv", "grid.png"):
        if (one / name).exists() and not same_file(one / name, other / name):
            wrong.append(name)
    pictures = [str(path.relative_to(one)) for path in one.glob("samples/*/*.png")]
    wrong += [name for name in pictures if not same_file(one / name, other / name)]
    tables = [[[row.get(name) for name in COLUMNS] for row in rows(run / "metrics.csv")] for run in (one, other)]
    if tables[0] != tables[1]:
        wrong.append("metrics.csv")
    checkpoints = [checkpoint(run / "checkpoints" / "last.ckpt") for run in (one, other)]
    wrong += [
        f"{key} in last.ckpt" for key in checkpoints[0] if not equal(checkpoints[0][key], checkpoints[1].get(key))
    ]
    steps = [json.loads((run / "finished.json").read_text())["step"] for run in (one, other)]
    if steps[0] != steps[1]:
        wrong.append("finished.json")
    names = [sorted(path.name for path in (run / "checkpoints").glob("[!.]*")) for run in (one, other)]
    if "last.ckpt" not in names[1] or len(names[0]) != len(names[1]):
        wrong.append(f"the checkpoints {names[1]}")
    left = [str(path.relative_to(other)) for path in other.rglob(".*.tmp")]
    return [f"{name} is not the same" for name in wrong] + [f"{name} is left over" for name in left]


def weights_of(run: Path) -> set[str]:
    """Return the LoRA files of a run, relative to it."""
    return {str(path.relative_to(run)) for path in run.glob(f"lora/*/{WEIGHTS}")}


def same_file(one: Path, other: Path) -> bool:
    """Return whether both files exist with the same bytes."""
    return os.path.exists(other) and one.read_bytes() == other.read_bytes()


def same_picture(one: Path, other: Path) -> bool:
    """Return whether both images exist with the same pixels; a PNG also stores its settings, with paths."""
    return os.path.exists(other) and Image.open(one).tobytes() == Image.open(other).tobytes()
