"""Sweeps whose jobs are jobs of Slurm, by hydra-submitit-launcher."""

import os
import re
import signal

import psutil
import pytest

from tests.support import fake_slurm
from tests.support.commands import ROOT, lora_bytes, metrics, short, wait_until

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder in which jobs run, on this machine."""
    monkeypatch.setenv("PATH", fake_slurm.install(tmp_path / "slurm"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of `tests.support.hold`
    yield tmp_path / "slurm"
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path) in " ".join(process.info["cmdline"] or []):
            process.kill()


def logs(folder):
    return "".join(path.read_text() for path in folder.rglob("*log*") if path.is_file())


def test_jobs_of_a_sweep_are_those_of_slurm_and_resume_when_they_are_queued_again(
    run, start, slurm, tiny, pairs, tmp_path
):
    settings = ["save_every=4", "scheduler=constant"]
    for number, rate in enumerate(("1e-4", "1e-3")):
        run("train", *short(tiny, pairs, tmp_path / "alone" / str(number), 8), *settings, f"optimizer.lr={rate}")
    sweep = tmp_path / "sweep"
    held = "+callbacks.hold={_target_: tests.support.hold.Hold, step: 6, marker: " + str(tmp_path / "held") + "}"
    command = [*short(tiny, pairs, sweep, 8), *settings, "resume=auto", "hydra/launcher=slurm", held]
    process = start("train", "-m", *command, "optimizer.lr=1e-4,1e-3")
    wait_until((tmp_path / "held").exists, process)
    wait_until(lambda: (tmp_path / "held").read_text() != "", process)
    os.kill(int((tmp_path / "held").read_text()), signal.SIGUSR2)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text + logs(tmp_path)
    assert "resume with the same command; job 7_" in logs(tmp_path)
    assert f"jobs are queued; their output goes to {sweep}/.submitit\n" in text
    assert f"all of them: {sweep}/report.html" in text
    for number in range(2):
        assert lora_bytes(sweep / str(number)) == lora_bytes(tmp_path / "alone" / str(number))
    assert [row["overrides"] for row in metrics(sweep, "sweep.csv")] == ["optimizer.lr=0.0001", "optimizer.lr=0.001"]
    assert (sweep / "report.html").is_file()
    script = (slurm / "job.sh").read_text()
    asked = ["--signal=USR2@180", "--requeue", "--open-mode=append", "--gpus-per-node=1", "--time=1440", "--array=0-1%"]
    for line in asked:
        assert re.search(rf"^#SBATCH {re.escape(line)}", script, re.MULTILINE), script
