"""Starting and resuming with data.shards=FOLDER on a cache of millions of samples: seconds and memory.

    python benchmarks/scale.py                                   # a minute, 2 GB in the temporary folder
    python benchmarks/scale.py --samples 20000 --shards 20       # seconds

The tars are empty: nothing is read from them. Prints the result, and writes it to benchmarks/results/scale.json.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as L
from hydra.utils import instantiate

from benchmarks.made_up_cache import write
from benchmarks.memory import compose
from datamodules.cached import CachedDataModule
from datamodules.sampler import SizeBatchSampler
from datamodules.shards.cache import Cache

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "scale.json"
# Epochs after which a run is resumed.
PLACES = {"start": 0.0, "middle": 0.5, "middle of the 50th epoch": 49.5}


def memory(which: str) -> float:
    """Return this process's resident memory in MB: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return round(int(found[1]) * 1024 / 1e6)


def measure(folder: Path, gpus: int) -> dict[str, object]:
    """Return seconds to the first entry of the sampler and to resume on the last GPU, and memory, at batch size 4."""
    settings = (f"data.shards={folder}", "data.batch_size=4", f"data.cache_dir={folder / 'unused'}", "seed=0")
    data = instantiate(compose("flux_kontext", "unused", "bfloat16", *settings).data, _convert_="all")
    assert isinstance(data, CachedDataModule)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    imported, begin = memory("VmRSS"), time.perf_counter()
    data.open(Cache(folder, {}))
    data.note_buckets()
    next(iter(data.sampler()))
    row: dict[str, object] = {"samples": data.sample_count, "seconds": round(time.perf_counter() - begin, 2)}
    for name, epochs in PLACES.items():
        begin = time.perf_counter()
        limits, last = data.batch_limits(), gpus - 1
        sampler = SizeBatchSampler(data.sizes, limits, data.seed, last, gpus, repeats=data.repeats)
        sampler.start = int(epochs * sampler.batches_per_epoch())
        next(iter(sampler))
        row[f"resume: {name}"] = round(time.perf_counter() - begin, 3)
    held: dict[str, object] = {
        "MB of imports": imported,
        "MB more": memory("VmRSS") - imported,
        "MB at the peak": memory("VmHWM"),
    }
    return row | held


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=250)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--measured", type=Path, help="a folder to measure in this process")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.measured:
        print(json.dumps(measure(given.measured, given.gpus)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "cache"), given.samples, given.shards)
        command = [sys.executable, "-m", "benchmarks.scale", f"--measured={folder}/cache", f"--gpus={given.gpus}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    row = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row, indent=1))
    versions = {name: version(name) for name in ("torch", "numpy")}
    facts = {"command": " ".join(["python", "benchmarks/scale.py", *sys.argv[1:]]), "cores": os.cpu_count()}
    given.output.write_text(json.dumps({**facts, "versions": versions, "shards": given.shards, **row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
