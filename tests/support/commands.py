"""train.py and predict.py as the tests call them."""

import contextlib
import csv
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import safetensors.torch
import torch
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

# How many commands these tests have run, by how they ended; the end of the suite prints it.
COUNTS: Counter[str] = Counter()
ROOT = Path(__file__).parent.parent.parent


def compose(name: str, *overrides: str) -> DictConfig:
    """Compose the config of train.py or predict.py."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose(name, overrides=list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            cfg.pop("hydra")
    return cfg


@cache
def class_of(model: str) -> type:
    """Return the class of a model's module."""
    return hydra.utils.get_class(compose("predict", f"model={model}").model._target_)


def unloaded(repository: Path | str, model: str = "flux_kontext", *more: str) -> Any:
    """Return a model's module as train.py instantiates it, before any weights are read."""
    path = f"model.pretrained_model_name_or_path={repository}"
    return hydra.utils.instantiate(compose("train", f"model={model}", path, *more).model, _convert_="all")


def scanned(*overrides: str) -> Any:
    """Return the data of a run on raw pairs, with its samples found."""
    data = hydra.utils.instantiate(compose("train", "data=pairs", *overrides).data, _convert_="all")
    data.scan()
    return data


class Outcome:
    """The exit status and the output of a command."""

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


@contextlib.contextmanager
def captured(path: Path | str):
    """Send the output of this process, and of those that it starts, to a file."""
    before = [os.dup(number) for number in (1, 2)]
    with (
        open(path, "a", buffering=1, errors="backslashreplace") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, copy in enumerate(before, start=1):
                os.dup2(copy, number)
                os.close(copy)


def run_here(script: str, *overrides: str) -> Outcome:
    """Run train.py or predict.py in this process, from its command line to its exit status."""
    status = 0
    with tempfile.NamedTemporaryFile("r") as output:
        # The variables that Lightning sets for its processes (MASTER_PORT) must not reach those of a later test.
        environment = mock.patch.dict(os.environ, HYDRA_FULL_ERROR="0")
        arguments = mock.patch.object(sys, "argv", [f"{script}.py", *map(str, overrides)])
        # Hydra would compose all settings a second time to find the mode, which no YAML sets.
        mode = mock.patch.object(Hydra, "get_mode", return_value=None)
        frozen = mock.patch.object(gc, "get_freeze_count", return_value=1)  # a million objects, counted by each command
        from tests.support.composition import known_files

        with environment, arguments, mode, frozen, known_files(), captured(output.name):
            try:
                importlib.import_module(script).main()
            except SystemExit as end:
                status = end.code
            finally:
                if torch.distributed.is_initialized():  # by a refused run; a later sweep would end at its first error
                    torch.distributed.destroy_process_group()
        COUNTS["refused" if status else "completed"] += 1
        return Outcome(status, output.read())


def run_task(task: str, *overrides: str) -> str:
    """Call the function of a task of predict.py with its settings, in this process, and return its output."""
    from cli.check_keys import chosen_task
    from cli.terminal import configure_logging

    cfg = compose("predict", f"task={task}", *map(str, overrides))
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("r") as output:
        # Tasks compose the settings of other models.
        with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"), captured(output.name):
            configure_logging()
            hydra.utils.get_method(chosen_task(task, "predict"))(cfg, folder)
        return output.read()


def run_code(code: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that must end well in a process of its own."""
    command, text = [sys.executable, "-c", code, *arguments], {"capture_output": True, "text": True}
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=cwd, check=False, **text)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def wait_until(condition: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = 90) -> None:
    """Wait for what a running process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.stdout and process.stdout.read()
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
    """Return the overrides of a short quiet run, or of one with images and a report; a worker's runs share a cache."""
    caches = repository.parent / f"caches-{os.environ.get('PYTEST_XDIST_WORKER', 'one')}"
    return [
        f"data={data}",
        *([f"data.cache_dir={caches}"] if data != "pairs" else []),
        f"model.pretrained_model_name_or_path={repository}",
        f"data.root={root}",
        f"output_dir={output}",
        f"trainer.max_steps={steps}",
        "trainer.accelerator=cpu",
        "data.num_workers=0",
        "adapter.rank=4",
        "logger=none",
        *(
            ["model.sampling.num_inference_steps=2"]
            if shown
            else ["callbacks.sample_images=null", "callbacks.report=null"]
        ),
    ]


def lora_bytes(run: Path, name: str = "last") -> bytes:
    return (run / "lora" / name / "pytorch_lora_weights.safetensors").read_bytes()


def weights(run):
    return safetensors.torch.load(lora_bytes(run))


def metrics(run, name="metrics.csv"):
    with (run / name).open() as file:
        return list(csv.DictReader(file))


def rows(folder, name="validation.csv"):
    with (folder / name).open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
