"""train.py against the floor, from pictures and from a cache: steps/s, seconds to the first step, peak memory.

    python benchmarks/training_speed.py            # all sizes, three rounds
    python benchmarks/training_speed.py --size 128 --rounds 1

Both train the embedded model in float32 on the same eight drawn pairs at one size, with the same batch and rank;
`compiled` is `cached` with model.compile=true. A round runs one after the other; the figures are medians over the
rounds, the ratios, to the floor that encodes in every step or once as they do, are taken within a round.
"""

import argparse
import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
WARM_UP = 20
FLOORS = {"pairs": "floor, pairs", "cached": "floor, cached"}
# What is measured: data=, and more settings
KINDS = {"pairs": ("pairs", []), "cached": ("cached", []), "compiled": ("cached", ["model.compile=true"])}


def make_data(folder: Path, size: int) -> Path:
    """Write eight pairs at size x size."""
    from benchmarks.photos.pairs import MAKE_IT_SUNSET, photographs

    for name in ("control_images", "training_images"):
        (folder / name).mkdir(parents=True)
    for name, control, target in itertools.islice(photographs("train"), 8):
        control.resize((size, size)).save(folder / "control_images" / f"{name}.png")
        target.resize((size, size)).save(folder / "training_images" / f"{name}.png")
        (folder / "training_images" / f"{name}.txt").write_text(MAKE_IT_SUNSET)
    return folder


class Measured(NamedTuple):
    """A process: steps/s by its median step, seconds to the first step, peak memory in MB, seconds in total."""

    speed: float
    first: float
    memory: float
    seconds: float


def measure(command: list[str], metrics: Path, warm_up: int = WARM_UP) -> Measured:
    """Run a process that writes `metrics`; the median is of the steps after `warm_up`."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, cwd=ROOT)
        while process.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.005)
        first = time.perf_counter() - start
        _, status, usage = os.wait4(process.pid, 0) if process.returncode is None else (0, process.returncode, None)
        if status or usage is None:
            log.seek(0)
            raise SystemExit(log.read().decode())
    total = time.perf_counter() - start
    with metrics.open() as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
    steps = [after - before for before, after in itertools.pairwise(seconds[warm_up - 1 :])]
    return Measured(1 / statistics.median(steps), first, usage.ru_maxrss / 1024, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="more overrides for train.py")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from lightning_modules.pretrained.repository import PHOTOS

    print(f"batch {arguments.batch}, rank {arguments.rank}, {arguments.steps} steps, {os.cpu_count()} cores")
    print(f"{'size':>5} {'':14} {'steps/s':>8} {'ratio':>6} {'first step':>11} {'memory':>9}")
    for size in arguments.size:
        floors = {name: FLOORS[KINDS[name][0]] for name in arguments.kinds}
        names = [*dict.fromkeys(floors.values()), *arguments.kinds]
        results: dict[str, list[Measured]] = {name: [] for name in names}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            data = make_data(folder / "data", size)
            for number in range(arguments.rounds):
                common = [str(arguments.steps), str(arguments.batch), str(arguments.rank)]
                for kind, name in FLOORS.items():
                    if name in results:
                        out = folder / f"floor-{kind}-{number}.csv"
                        command = ["benchmarks/floor.py", kind, str(PHOTOS), str(data), *common, str(out)]
                        results[name].append(measure(command, out))
                for name in arguments.kinds:
                    kind, more = KINDS[name]
                    run = folder / f"{name}-{number}"
                    command = [
                        "train.py",
                        "model=embedded",
                        f"data={kind}",
                        f"data.root={data}",
                        f"output_dir={run}",
                        f"trainer.max_steps={arguments.steps}",
                        f"data.batch_size={arguments.batch}",
                        f"adapter.rank={arguments.rank}",
                        "data.num_workers=0",
                        "callbacks.sample_images=null",
                        "save_every=0",
                        *([f"data.cache_dir={folder / f'cache-{name}-{number}'}"] if kind == "cached" else []),
                        *more,
                        *arguments.overrides,
                    ]
                    results[name].append(measure(command, run / "metrics.csv"))
        for name, rounds in results.items():
            compared = results[floors.get(name, name)]
            ratio = statistics.median(own.speed / floor.speed for own, floor in zip(rounds, compared, strict=True))
            speed, first, memory, _ = (statistics.median(values) for values in zip(*rounds, strict=True))
            print(f"{size:5} {name:14} {speed:8.2f} {ratio:6.3f} {first:9.2f} s {memory:6.0f} MB", flush=True)


if __name__ == "__main__":
    main()
