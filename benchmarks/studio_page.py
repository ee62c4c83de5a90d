"""The page of studio.py: seconds of the first page with many runs, and its cost for a run that trains.

python -m benchmarks.studio_page [--runs 200] [--rounds 5] [--steps 60] writes to benchmarks/results/studio_page.json.

The page asks for a run's page every 2 s and for the list every 3 s, as two open browser tabs do. Training uses one
thread: on a machine with a GPU, too, the page has a core of its own.
"""

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "studio_page.json"
WARM_UP = 10  # steps


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


def train(folder: Path, name: str, steps: int) -> float:
    """Train the small model; return the median seconds of a step."""
    settings = [f"trainer.max_steps={steps}", "sample_every=0", "save_every=0", "callbacks.sample_images=null"]
    command = [sys.executable, str(ROOT / "train.py"), *settings, f"output_dir=outputs/{name}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    with (folder / "outputs" / name / "metrics.csv").open(newline="") as file:
        seconds = [float(row["seconds"]) for row in csv.DictReader(file)][WARM_UP:]
    return statistics.median(after - before for before, after in pairwise(seconds))


@contextmanager
def watched(client: httpx.Client, name: str) -> Iterator[list[float]]:
    """Temporarily ask for the pages of a run and of the list, as open tabs do; yield the seconds of the answers."""
    ended, took = threading.Event(), []

    def ask() -> None:
        for second in range(10**6):
            if ended.wait(1):
                return
            for every, address in ((2, f"/run?run={name}"), (3, "/runs")):
                if second % every == 0:
                    start = time.perf_counter()
                    client.get(address)
                    took.append(time.perf_counter() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, "0", chosen.steps)
        for index in range(1, chosen.runs):
            shutil.copytree(
                folder / "outputs/0", folder / f"outputs/{index}", ignore=lambda *_: ["checkpoints", "lora"]
            )
        with studio(folder) as client:
            first = float(client.headers["x-first"])
        steps: dict[str, list[float]] = {"without": [], "with": []}
        answers: list[float] = []
        for turn in range(chosen.rounds):
            steps["without"].append(train(folder, f"without-{turn}", chosen.steps))
            with studio(folder) as client, watched(client, f"with-{turn}") as took:
                steps["with"].append(train(folder, f"with-{turn}", chosen.steps))
            answers += took
    ratios = [there / here for there, here in zip(steps["with"], steps["without"], strict=True)]
    figures = {
        "command": "python -m benchmarks.studio_page " + " ".join(sys.argv[1:]),
        "runs": chosen.runs,
        "first_page_seconds": round(first, 3),
        "later_answers_median_seconds": round(statistics.median(answers), 4),
        "step_seconds": {name: [round(one, 4) for one in values] for name, values in steps.items()},
        "step_ratio_median": round(statistics.median(ratios), 4),
    }
    RESULT.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
