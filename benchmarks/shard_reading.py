"""Measure reading of local shards, compared with a plain read of the same bytes and one .pt file per sample.

python benchmarks/shard_reading.py --rounds 5
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

from datamodules.prefetch import ThreadedLoader
from datamodules.sampler import SizeBatchSampler
from datamodules.shards.cache import Cache, Folder
from datamodules.shards.reader import LatentReader, index_of

WORKERS = 2


def sample(number: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return random latents and text of a 1024 x 1024 pair for FLUX Kontext in bf16."""
    generator = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16)

    latents = {name: draw(16, 128, 128) for name in ("target_mean", "target_std", "control_0")}
    return latents, {"prompt_embeds": draw(512, 4096), "pooled_prompt_embeds": draw(768)}


def write(folder: Path, count: int) -> Cache:
    """Write the same samples as shards and as .pt files, each with its own prompt."""
    cache = Cache(folder / "cache", {})
    shard = cache.new_shard(0)
    (folder / "files").mkdir()
    for number in range(count):
        if shard.size > 2**29:
            cache.seal(shard)
            shard = cache.new_shard(0)
        latents, text = sample(number)
        names = {"prompts": [f"prompt-{number}"], "empty_prompt": f"prompt-{number}"}
        facts = {"key": str(number), **names, "sizes": [[1024, 1024]] * 2, "mask": False}
        shard.add(f"prompt-{number}", text, {})
        shard.add(f"sample-{number}", latents, {**facts, "tokens": 8704})
        torch.save({**latents, **text}, folder / "files" / f"{number}.pt")
    cache.seal(shard)
    cache.merge()
    return cache


class Files(Dataset[dict[str, torch.Tensor]]):
    """A data set with one .pt file per sample."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __getitem__(self, item: tuple[int, int]) -> dict[str, torch.Tensor]:
        return torch.load(self.paths[item[0]], weights_only=True)


def read_sequentially(folder: Path, count: int) -> float:
    """Return samples per second when one process reads the tars' bytes into one buffer."""
    buffer = bytearray(2**23)
    start = time.perf_counter()
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return count / (time.perf_counter() - start)


def measure(loader: Iterable[Any], batch_size: int, draws: int) -> float:
    """Return the samples per second that arrive, after the first few."""
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    start = time.perf_counter()
    for _ in range(draws // batch_size):
        next(batches)
    return draws // batch_size * batch_size / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        cache = write(folder, count := arguments.samples)
        samples = list(index_of(cache.rows()).samples.values())
        shards = LatentReader(Folder(cache.folder), samples, empty_prompt=False)
        files = Files(folder / "files")
        print(
            f"{count} samples of {cache.manifest()['bytes'] / count / 1e6:.2f} MB; medians of {arguments.rounds} rounds"
        )
        results: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            results.setdefault("sequential read", []).append(read_sequentially(cache.folder, count))
            for size in (1, 4):
                sampler = SizeBatchSampler(["one size"] * count, size, seed=0)
                ours = ThreadedLoader(shards, sampler, WORKERS)
                theirs = DataLoader(dataset=files, batch_sampler=sampler, num_workers=WORKERS)
                results.setdefault(f"shards, batch {size}", []).append(measure(ours, size, 2 * count))
                results.setdefault(f".pt files, batch {size}", []).append(measure(theirs, size, 2 * count))
        for name, rates in results.items():
            ratio = statistics.median(a / b for a, b in zip(rates, results["sequential read"], strict=True))
            print(f"{name:24} {statistics.median(rates):6.0f} samples/s  {ratio:.2f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
