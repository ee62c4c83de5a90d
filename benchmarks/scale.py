"""Millions of samples and many GPUs: starting, resuming, streaming, and what an epoch costs.

    python benchmarks/scale.py                                              # six minutes, 8 GB in the temporary folder
    python benchmarks/scale.py --samples 20000 --shards 20 --cached 5000    # seconds

Measured in processes of their own, with made-up indices and empty tars: starting and resuming with data.shards=FOLDER.
Simulated: GPUs that stream from object storage (`object_storage.py`). By arithmetic: what an epoch costs. Prints
tables, and writes them to benchmarks/results/scale.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.made_up_cache import write
from benchmarks.object_storage import Reading, Storage, simulate

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "scale.json"
SAMPLES_OF_A_SHARD = 4000
# Of each option that is assumed: what it is, in which unit, and why this much.
ASSUMED = {
    "latents_mb": (1.5, "MB a sample", "FLUX Kontext, a pair of one megapixel in bf16 (docs/shards.md)"),
    "prompt_mb": (4.2, "MB a prompt", "each sample has one of its own (docs/shards.md)"),
    "shard_mb": (537.0, "MB a shard", "data.shard_size"),
    "first_byte_ms": (20.0, "ms to a request's first byte", "exponentially distributed around it"),
    "connection_mb": (100.0, "MB/s a connection", "one request's stream"),
    "storage_gb": (10.0, "GB/s of the storage", "for all connections together"),
    "get_price": (0.0004, "$ for 1,000 GET requests", "S3 Standard, us-east-1, list price"),
    "egress_price": (0.09, "$ for a GB that leaves the region", "S3 to the internet, list price; 0 within the region"),
    "gpu_price": (3.0, "$ an hour of a GPU", "rented H100 or H200"),
}


def start(folder: Path, gpus: int) -> dict[str, Any]:
    """Run `shards_start.py` in a new process and return its measurements."""
    command = [sys.executable, "-m", "benchmarks.shards_start", str(folder), "--gpus", str(gpus)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def starting(folder: Path, samples: int, shards: int, gpus: int) -> dict[str, Any]:
    """Return the row of a cache with so many samples."""
    print(f"writing the index of {samples:,} samples ...", file=sys.stderr)
    write(folder, samples, shards)
    found = start(folder, gpus)
    return {
        **{"samples": samples, "shards": shards, "seconds": found["first"]},
        **{"MB of imports": found["imported_mb"], "MB beside them": found["held_mb"] - found["imported_mb"]},
        "MB at the peak": found["peak_mb"],
        **{f"resume: {place}": seconds for place, seconds in found["resumed"].items()},
    }


def streaming(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each step time."""
    storage = Storage(given.first_byte_ms / 1e3, given.connection_mb * 1e6, given.storage_gb * 1e9)
    sample = (given.latents_mb + given.prompt_mb) * 1e6
    reading = Reading(given.gpus, given.threads, given.batch, sample, given.shard_mb * 1e6, given.shuffle_buffer)
    rows = []
    for step in given.step_seconds:
        outcome = simulate(storage, reading, step, given.seconds)
        rows.append(
            {"seconds a step": step, "wanted, samples/s": round(given.gpus * given.batch / step, 1)}
            | {"read, samples/s": round(outcome.rate, 1), "possible, samples/s": round(outcome.possible, 1)}
            | {"first batch, s": round(outcome.first, 1), "waiting": f"{outcome.waiting:.1%}"}
            | {"requests/s": round(outcome.requests, 2)}
        )
    return rows


def costs(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the costs of an epoch, a row for each step time."""
    gigabytes = given.samples * (given.latents_mb + given.prompt_mb) / 1e3
    requests = -(-gigabytes * 1e3 // given.shard_mb)
    rows = []
    for step in given.step_seconds:
        hours = given.samples / given.batch * step / 3600
        rows.append(
            {"seconds a step": step, "GPU hours": round(hours, 1)}
            | {"days": round(hours / given.gpus / 24, 2), "GPUs, $": round(hours * given.gpu_price)}
            | {"TB": round(gigabytes / 1e3, 2), "requests": int(requests)}
            | {"requests, $": round(requests / 1000 * given.get_price, 4)}
            | {"egress, $": round(gigabytes * given.egress_price)}
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(f'{x:,}' if isinstance(x, int) else str(x) for x in line)} |" for line in lines)


def parsed() -> argparse.Namespace:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000, help="of the large index, and of an epoch's costs")
    parser.add_argument("--shards", type=int, default=2000, help="of the large index")
    parser.add_argument("--cached", type=int, default=1_000_000, help="samples of the complete cache")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="data.num_workers")
    parser.add_argument("--batch", type=int, default=1, help="data.batch_size, while streaming")
    parser.add_argument("--shuffle_buffer", type=int, default=64, help="samples that a thread holds")
    parser.add_argument("--step_seconds", type=float, nargs="+", default=[1.0, 0.1, 0.03])
    parser.add_argument("--seconds", type=float, default=60, help="of training that are simulated")
    for name, (value, unit, _) in ASSUMED.items():
        parser.add_argument(f"--{name}", type=float, default=value, help=unit)
    parser.add_argument("--folder", help="where there is room; default: the temporary one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Measure, simulate and calculate."""
    given = parsed()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        place, few = Path(folder), -(-given.cached // SAMPLES_OF_A_SHARD)
        cached = starting(place / "cached", given.cached, few, given.gpus)
        large = starting(place / "large", given.samples, given.shards, given.gpus)
    assumed = [
        {"option": name, "value": getattr(given, name), "what": unit, "because": reason}
        for name, (_, unit, reason) in ASSUMED.items()
    ]
    assumed += [
        {"option": name, "value": str(getattr(given, name)), "what": what, "because": "chosen"}
        for name, what in (
            ("step_seconds", "seconds a step; none was measured on a GPU"),
            ("batch", "samples of a GPU in a step"),
            ("gpus", "processes"),
            ("threads", "connections of each"),
            ("shuffle_buffer", "samples of each thread"),
        )
    ]
    parts = {
        "Starting with data.shards=FOLDER, and resuming": [cached, large],
        f"Streaming to {given.gpus} GPUs, simulated": streaming(given),
        f"An epoch of {given.samples:,} samples on {given.gpus} GPUs, by arithmetic": costs(given),
        "Assumed": assumed,
    }
    for title, rows in parts.items():
        print(f"\n{title}\n\n{table(rows)}")
    command = " ".join(["python", "benchmarks/scale.py", *sys.argv[1:]])
    versions = {name: version(name) for name in ("torch", "numpy")}
    facts = {"command": command, "cores": os.cpu_count(), "versions": versions}
    given.output.write_text(json.dumps({**facts, **parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
