"""What can only be measured on a GPU runs, at a tiny size."""

import json
import os
import subprocess
import sys

from tests.support.commands import ROOT


def test_full_size_benchmark_runs(tiny, tmp_path):
    output = tmp_path / "results.json"
    small = ["--folder", str(tiny), "--size", "64", "--rounds", "1", "--matrix", "64", "--output", str(output)]
    command = [sys.executable, "benchmarks/full_size.py", *small, "--precisions", "bf16", "fp8", "nf4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert [(row["precision"], row["checkpointing"]) for row in result["rows"]] == [
        (precision, position) for precision in ("bf16", "fp8", "nf4") for position in ("full", "none")
    ]
    assert all(row["samples_per_second"] > 0 and row["tflops"] is not None for row in result["rows"])
    weights = {row["precision"]: row["weights_mb"] for row in result["rows"]}
    assert weights["nf4"] < weights["fp8"] < weights["bf16"]
