"""What must survive: killed runs and cache builds, two at once, a full disk. Results are compared to the bit.

    python benchmarks/interruptions.py                 # 14 kills of a run, 9 of a cache build, about five minutes
    python benchmarks/interruptions.py --kills 3 --parts run

Real processes of train.py and predict.py on drawn pairs, killed (SIGKILL) at random moments and started again by the
same command. Exits with 1 where something differs.
"""

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from datamodules.shards.tar import read_rows

ROOT = Path(__file__).parent.parent
SETTINGS = [
    "experiment=shapes",
    "trainer.max_steps=24",
    "save_every=4",
    "sample_every=8",
    "data.source.count=24",
    "data.val_count=4",
    "callbacks.sample_images.count=4",
    "model.sampling.num_inference_steps=2",
    "data.num_workers=0",
    "trainer.accelerator=cpu",
    "logger=none",
]
COMPARED = ("lora/last/pytorch_lora_weights.safetensors", "validation.csv", "grid.png")
WRITTEN = 200_000  # bytes that a file may have on the disk that is full


def start(script: str, folder: Path, *overrides: str, full: bool = False) -> subprocess.Popen[str]:
    """A process in `folder`, its output in a log there."""

    def limit() -> None:
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (WRITTEN, WRITTEN))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log.txt").open("a") as log:
        command = [sys.executable, str(ROOT / f"{script}.py"), *overrides]
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, text=True, preexec_fn=limit
        )


def finish(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for one that must succeed."""
    if process.wait() != 0:
        raise RuntimeError(f"it failed:\n{(folder / 'log.txt').read_text()[-2000:]}")


def kill_often(begin: Callable[[], subprocess.Popen[str]], kills: int, seconds: float) -> int:
    """Kill after a random time and begin again, then let it end; gives how many kills hit a living process."""
    hit = 0
    for _ in range(kills):
        process = begin()
        time.sleep(random.uniform(0.1, 0.7) * seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            hit += 1
        process.wait()
    return hit


def run_arguments(folder: Path) -> list[str]:
    """Going on, where there is something to go on from."""
    goes_on = (folder / "run" / "checkpoints" / "last.ckpt").is_file()
    return [*SETTINGS, "output_dir=run", *(["ckpt_path=last"] if goes_on else [])]


def differing(one: Path, other: Path) -> list[str]:
    """The files of two runs that are not the same bytes."""
    return [name for name in COMPARED if (one / "run" / name).read_bytes() != (other / "run" / name).read_bytes()]


def cached(folder: Path) -> dict[str, int]:
    """The samples and prompts of a cache, with the checksums of their tensors."""
    [index] = folder.glob("cache/*/index.jsonl")
    return {row["id"]: row["crc32"] for row in read_rows(index)}


def run_part(folders: Callable[[str], Path], kills: int) -> list[str]:
    """A run that is killed often against one that is not."""
    whole, killed = folders("whole"), folders("killed")
    began = time.monotonic()
    finish(start("train", whole, *run_arguments(whole)), whole)
    seconds = time.monotonic() - began
    hit = kill_often(lambda: start("train", killed, *run_arguments(killed)), kills, seconds)
    finish(start("train", killed, *run_arguments(killed)), killed)
    print(f"run: {hit} of {kills} kills hit it; it takes {seconds:.0f} s")
    return differing(whole, killed)


def cache_part(folders: Callable[[str], Path], kills: int) -> list[str]:
    """A cache whose building is killed often against one that is built at once."""
    whole, killed = folders("whole cache"), folders("killed cache")
    arguments = ["task=cache", "data=shapes", "trainer.accelerator=cpu", "data.num_workers=0", "data.source.count=200"]
    began = time.monotonic()
    finish(start("predict", whole, *arguments), whole)
    seconds = time.monotonic() - began
    hit = kill_often(lambda: start("predict", killed, *arguments), kills, seconds)
    finish(start("predict", killed, *arguments), killed)
    print(f"cache: {hit} of {kills} kills hit its building; it takes {seconds:.0f} s")
    return [] if cached(whole) == cached(killed) else ["the caches"]


def two_part(folders: Callable[[str], Path], kills: int) -> list[str]:
    """Two runs at once that fill one cache."""
    alone, folder = folders("alone"), folders("two")
    finish(start("train", alone, *run_arguments(alone)), alone)
    both = [start("train", folder, *SETTINGS, f"output_dir={name}") for name in ("run", "other")]
    for process in both:
        finish(process, folder)
    other = (folder / "other" / COMPARED[0]).read_bytes()
    return differing(alone, folder) + ([] if other == (folder / "run" / COMPARED[0]).read_bytes() else ["the second"])


def disk_part(folders: Callable[[str], Path], kills: int) -> list[str]:
    """A disk that is full while the cache is built, and has room again."""
    whole, full = folders("room"), folders("full")
    finish(start("train", whole, *run_arguments(whole)), whole)
    status = start("train", full, *run_arguments(full), full=True).wait()
    log = (full / "log.txt").read_text()
    clear = status == 1 and "Traceback" not in log and "error: cannot write" in log
    finish(start("train", full, *run_arguments(full)), full)
    return differing(whole, full) + ([] if clear else [f"the message: {log[-300:]}"])


PARTS = {"run": run_part, "cache": cache_part, "two": two_part, "disk": disk_part}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="of each part; 14 of a run and 9 of a cache build where left out")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    failed = []
    for name in options.parts:
        with tempfile.TemporaryDirectory() as temporary:

            def folders(name: str, place: Path = Path(temporary)) -> Path:
                (place / name).mkdir()
                return place / name

            wrong = PARTS[name](folders, options.kills or {"run": 14, "cache": 9}.get(name, 0))
        print(f"{name}: {'the same bits' if not wrong else 'DIFFERENT: ' + ', '.join(wrong)}", flush=True)
        failed += wrong
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
