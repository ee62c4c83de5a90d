"""train.py and predict.py as the tests call them."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hydra
import safetensors.torch
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

ROOT = Path(__file__).parent.parent.parent


def compose(name: str, *overrides: str) -> DictConfig:
    """The composed config of train.py or predict.py."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose(name, overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            cfg.pop("hydra")
    return cfg


class Outcome:
    """What a command left: exit status and what it printed."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.text = text

    @property
    def error(self) -> str:
        """The one line that a mistake should give."""
        assert self.status == 1, self.text
        assert "Traceback" not in self.text
        lines = [line for line in self.text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.text
        return lines[0]


def start_cold(script: str, *overrides: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen:
    """Start train.py or predict.py as a new process, which has all to import."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / f"{script}.py"), *map(str, overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        cwd=cwd,
        start_new_session=True,
    )


def run_code(code: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that must end well in a process of its own."""
    command, text = [sys.executable, "-c", code, *arguments], {"capture_output": True, "text": True}
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=cwd, check=False, **text)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 90) -> None:
    """Wait for what a running process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def kill_when(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """kill -9, as soon as a running process has done something."""
    wait_until(condition, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def short(
    repository: Path, root: Path | str, output: Path, steps: int, data: str = "cached", shown: bool = False
) -> list[str]:
    """Overrides of a short quiet run. What it encodes stands beside its model, for all runs of a session.

    Args:
        shown: with sample pictures and a report.
    """
    return [
        f"data={data}",
        *([f"data.cache_dir={repository.parent / 'caches'}"] if data != "pairs" else []),
        f"model.pretrained_model_name_or_path={repository}",
        f"data.root={root}",
        f"output_dir={output}",
        f"trainer.max_steps={steps}",
        "trainer.accelerator=cpu",
        "data.num_workers=0",
        "adapter.rank=4",
        "logger=none",
        *([] if shown else ["callbacks.sample_images=null", "callbacks.report=null"]),
    ]


def lora_bytes(run: Path, name: str = "last") -> bytes:
    return (run / "lora" / name / "pytorch_lora_weights.safetensors").read_bytes()


def weights(run):
    return safetensors.torch.load(lora_bytes(run))


def metrics(run):
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def assert_same_weights(first, second, **tolerance):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(first[key], second[key], **tolerance)


def rows(folder, name="validation.csv"):
    with (folder / name).open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
