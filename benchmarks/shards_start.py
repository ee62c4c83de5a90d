"""Measure seconds and memory of a run with data.shards=FOLDER up to its first batches, in this process.

    python benchmarks/shards_start.py FOLDER
    python benchmarks/shards_start.py FOLDER --gpus 64

Prints one JSON object. The cache needs no tensors (`made_up_cache.py`): nothing is read from its tars.
"""

import argparse
import json
import re
import time
from pathlib import Path

import lightning.pytorch as L
from hydra.utils import instantiate

from benchmarks.memory import compose
from datamodules.cached import CachedDataModule
from datamodules.sampler import SizeBatchSampler
from datamodules.shards.cache import Cache

# Epochs after which a run is resumed.
PLACES = {"start": 0.0, "middle": 0.5, "middle of the 50th epoch": 49.5}


def memory(which: str) -> float:
    """Return this process's resident memory in MB: VmRSS now, VmHWM at its peak (getrusage includes a parent's)."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return round(int(found[1]) * 1024 / 1e6)


def measure(folder: Path, gpus: int) -> dict[str, object]:
    """Of data.batch_size=4.

    Returns, beside the number of samples: seconds to the first entry of the sampler; memory in MB of what is imported,
    afterwards and at the peak; and seconds to resume at each of `PLACES`, on the last of some GPUs.
    """
    settings = (f"data.shards={folder}", "data.batch_size=4", f"data.cache_dir={folder / 'unused'}", "seed=0")
    data = instantiate(compose("flux_kontext", "unused", "bfloat16", *settings).data, _convert_="all")
    assert isinstance(data, CachedDataModule)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    imported, begin = memory("VmRSS"), time.perf_counter()
    data.open(Cache(folder, {}))
    opened = time.perf_counter() - begin
    data.note_buckets()
    next(iter(data.sampler()))
    first = time.perf_counter() - begin
    resumed = {}
    for name, epochs in PLACES.items():
        begin = time.perf_counter()
        limits, last = data.batch_limits(), gpus - 1
        sampler = SizeBatchSampler(data.sizes, limits, data.seed, last, gpus, repeats=data.repeats)
        sampler.start = int(epochs * sampler.batches_per_epoch())
        next(iter(sampler))
        resumed[name] = round(time.perf_counter() - begin, 3)
    return {
        "samples": data.sample_count,
        "open": round(opened, 2),
        "first": round(first, 2),
        "imported_mb": imported,
        "held_mb": memory("VmRSS"),
        "peak_mb": memory("VmHWM"),
        "resumed": resumed,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    given = parser.parse_args()
    print(json.dumps(measure(given.folder, given.gpus)))


if __name__ == "__main__":
    main()
