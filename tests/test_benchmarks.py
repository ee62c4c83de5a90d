"""What can only be measured on a GPU runs, at a tiny size."""

import json
import sys

import pytest
import torch

from benchmarks import full_size
from benchmarks.gpu import speed
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import PARTS
from tests.support.commands import ROOT, run_code

GPU_CHECK = "import sys; from benchmarks import gpu_check; sys.argv[0] = 'gpu_check.py'; "


def read(output):
    return json.loads(output.read_text()), output.with_suffix(".md").read_text()


@pytest.mark.slow
def test_full_size_benchmark_runs(tiny, tmp_path, monkeypatch):
    output = tmp_path / "results.json"
    small = ["--folder", str(tiny), "--size", "64", "--rounds", "1", "--matrix", "64", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["full_size.py", *small, "--precisions", "bf16", "fp8", "nf4"])
    full_size.main()
    result = json.loads(output.read_text())
    assert [(row["precision"], row["checkpointing"]) for row in result["rows"]] == [
        (precision, position) for precision in ("bf16", "fp8", "nf4") for position in ("full", "none")
    ]
    assert all(row["samples_per_second"] > 0 and row["tflops"] is not None for row in result["rows"])
    weights = {row["precision"]: row["weights_mb"] for row in result["rows"]}
    assert weights["nf4"] < weights["fp8"] < weights["bf16"]


@pytest.mark.slow
def test_gpu_check_runs_on_a_cpu_with_nothing_installed_but_what_it_names(tmp_path):
    """All parts, train.py among them."""
    output = tmp_path / "results" / "tiny.json"
    named = "torch", "diffusers", "peft", "bitsandbytes", "lightning", "hydra-core"
    assert all(name in (ROOT / "benchmarks" / "gpu_check.py").read_text() for name in named)
    few = f"from tests.support.installed import only; only(*{named}); "
    hidden = "from importlib.util import find_spec; assert not find_spec('webdataset'); assert find_spec('torch'); "
    code = few + hidden + GPU_CHECK + "sys.exit(gpu_check.main())"
    run_code(code, "--tiny", "--minutes", "60", "--output", str(output))
    result, table = read(output)
    assert list(result["results"])[:10] == list(PARTS)[:10]
    assert all(record["status"] == "passed" and record["facts"] for record in result["results"].values())
    rows = [PARTS[name].row for name in result["results"] if PARTS[name].row is not None]
    for place, values in enumerate(zip(*rows, strict=True)):
        assert set(values) == {part.row[place] for part in PARTS.values() if part.row is not None}
    assert all(record["facts"]["estimated_gb"] is not None for record in result["results"].values() if "row" in record)
    assert all(f"| {name.removeprefix('speed ')}" in table for name in result["results"])


SABOTAGE = """
import os, signal, time
from benchmarks.gpu.parts import PARTS

def raises(bench, facts): facts["known"] = 1; raise RuntimeError("CUDA error: an illegal memory access\\nmore")
def dies(bench, facts): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(bench, facts): time.sleep(600)
def finds(bench, facts): return ["this is wrong", "so is that"]

changed = {"offload_blocks": dies, "ortho_tlora": raises, "bases": hangs, "block": finds}
PARTS |= {name: PARTS[name]._replace(run=f"__main__:{one.__name__}") for name, one in changed.items()}
PARTS["bases"] = PARTS["bases"]._replace(limit=1)
status = gpu_check.main()
assert status == 1, status
"""


@pytest.mark.slow
def test_gpu_check_goes_on_after_what_fails_dies_or_hangs_and_names_it(tmp_path):
    output = tmp_path / "results.json"
    chosen = ["offload_blocks", "scaled_mm", "ortho_tlora", "bases", "block"]
    done = run_code(GPU_CHECK + SABOTAGE, "--tiny", "--output", str(output), "--only", *chosen)
    result, table = read(output)
    assert list(result["results"]) == chosen
    statuses = {name: record["status"] for name, record in result["results"].items()}
    assert statuses == dict.fromkeys(chosen, "failed") | {"scaled_mm": "passed"}
    assert result["results"]["ortho_tlora"]["facts"] == {"known": 1}
    assert "Traceback" in result["results"]["ortho_tlora"]["traceback"]
    lines = [
        "offload_blocks: its process ended with status -11, see the log",
        "ortho_tlora: RuntimeError: CUDA error: an illegal memory access",
        "bases: not done after 1 s",
        "block: this is wrong",
        "block: so is that",
    ]
    assert done.stdout.splitlines()[-6:] == ["failed:", *lines]
    assert all(f"- {line}\n" in table for line in lines)


def test_gpu_check_names_what_it_has_no_time_for(tmp_path):
    output = tmp_path / "results.json"
    code = GPU_CHECK + "sys.exit(gpu_check.main())"
    done = run_code(code, "--output", str(output), "--minutes", "0", "--only", "speed flux_kontext nf4")
    result, table = read(output)
    assert [record["status"] for record in result["results"].values()] == ["skipped"] * 2
    assert all(name in done.stdout.splitlines()[-2] for name in result["results"])
    assert table.count("| skipped |") == 2


def test_a_row_that_runs_out_of_memory_is_a_result(tmp_path, monkeypatch):
    def measure(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(full_size, "measure", measure)
    facts, row = {}, next(part.row for part in PARTS.values() if part.row is not None)
    assert speed.measured(Bench(torch.device("cpu"), True, tmp_path), facts, row) == []
    assert facts["out_of_memory"]


@pytest.mark.parametrize("only", [["nothing"], ["speed x"]])
def test_gpu_check_names_the_parts_where_none_is_chosen(only, monkeypatch, capsys):
    from benchmarks import gpu_check

    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", *only])
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert "choose offload_blocks, scaled_mm" in capsys.readouterr().err
