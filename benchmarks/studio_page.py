"""The page of studio.py: seconds of the first page with many runs, and its cost for a run that trains.

python -m benchmarks.studio_page [--runs 200] [--blocks 20] writes to benchmarks/results/studio_page.json.

In every second block of steps of one run, its page is asked for every 2 s and the list every 3 s, as by two open tabs
of a browser. Training uses one thread: on a machine with a GPU, too, the page has a core of its own.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

from report.tables import last_metrics, read_metrics

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "studio_page.json"
BLOCK, EDGE = 60, 10  # steps, of which the first ones may still be as before


@contextmanager
def studio(folder: Path) -> Iterator[httpx.Client]:
    """Temporarily serve the runs below a folder."""
    with (folder / "studio.log").open("w+") as log:
        command = [sys.executable, str(ROOT / "studio.py"), "open=false", "port=0"]
        process = subprocess.Popen(command, cwd=folder, stderr=log)
        try:
            while (found := re.search(r"http://\S+", (folder / "studio.log").read_text())) is None:
                time.sleep(0.1)
            with httpx.Client(base_url=found[0].partition("/?")[0], timeout=60) as client:
                start = time.perf_counter()
                client.get(found[0], follow_redirects=True)
                client.headers["x-first"] = str(time.perf_counter() - start)
                yield client
        finally:
            process.terminate()
            process.wait()


def train(folder: Path, name: str, steps: int) -> subprocess.Popen[bytes]:
    """Start training the small model."""
    settings = [f"trainer.max_steps={steps}", "trainer.log_every_n_steps=1", "sample_every=0", "save_every=0"]
    settings += ["data.resolution=32", "data.val_root=null"]
    command = [sys.executable, str(ROOT / "train.py"), *settings, f"output_dir=outputs/{name}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def watch(client: httpx.Client, run: subprocess.Popen[bytes], metrics: Path) -> list[float]:
    """Ask for pages in every second block of steps until a run ends; return the seconds of the answers."""
    took: list[float] = []
    for second in itertools.count():
        time.sleep(1)
        if run.poll() is not None:
            return took
        block = int(last_metrics(metrics).get("step", 0)) // BLOCK
        for every, address in ((2, "/run?run=watched"), (3, "/runs")):
            if block % 2 and second % every == 0:
                start = time.perf_counter()
                client.get(address)
                took.append(time.perf_counter() - start)
    raise AssertionError


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=20)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, "0", 20).wait()
        for index in range(1, chosen.runs):
            shutil.copytree(
                folder / "outputs/0", folder / f"outputs/{index}", ignore=lambda *_: ["checkpoints", "lora"]
            )
        with studio(folder) as client:
            run = train(folder, "watched", BLOCK * chosen.blocks)
            answers = watch(client, run, folder / "outputs/watched/metrics.csv")
            first = float(client.headers["x-first"])
        seconds = [float(row["seconds"]) for row in read_metrics(folder / "outputs/watched/metrics.csv")]
    steps = [after - before for before, after in pairwise(seconds)]
    blocks = [statistics.median(steps[at + EDGE : at + BLOCK]) for at in range(0, len(steps), BLOCK)][2:]
    ratios = [there / here for here, there in zip(blocks[::2], blocks[1::2], strict=False)]
    figures = {
        "command": " ".join(["python -m benchmarks.studio_page", *sys.argv[1:]]),
        "runs": chosen.runs,
        "first_page_seconds": round(first, 3),
        "later_answers_median_seconds": round(statistics.median(answers), 4),
        "step_seconds_without_and_with": [round(one, 4) for one in blocks],
        "step_ratio_median": round(statistics.median(ratios), 4),
    }
    RESULT.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
