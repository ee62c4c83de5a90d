"""Tiny real pipelines and real photographs, offline."""

import functools
import gc
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same suite, whatever the machine has
os.environ["OMP_NUM_THREADS"] = "1"  # workers on few cores
os.environ["COLUMNS"] = "250"  # long paths stay on one line

import pytest
import torch
from hydra._internal.hydra import Hydra
from hypothesis import settings
from lightning import seed_everything
from PIL import Image

import predict
import train
from tests.support.commands import Outcome, short
from tests.support.pictures import make_pairs, photograph
from tests.support.several_runs import start_two
from tests.support.tiny_pipelines import MODELS
from tests.support.warm import Warm

torch.set_num_threads(1)
settings.register_profile("same examples every time", derandomize=True, deadline=None)
settings.load_profile("same examples every time")


# Files whose tests take long: they come first, that none is alone at the end.
LONG = (
    "test_benchmarks",
    "test_distributed",
    "test_peers",
    "test_cache_builds",
    "test_shares",
    "test_loading_memory",
    "test_shapes_model",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.path.name.startswith(LONG))


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_frozen():
    """What was imported and made so far stays: the garbage collection after each run need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Each test draws what it drew the last time, alone or in the suite."""
    seed_everything(0, verbose=False)


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory):
    """What goes to the present folder by default goes to a temporary one."""
    os.chdir(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="session")
def repositories(tmp_path_factory) -> dict[str, Path]:
    """For each model= a tiny pipeline on disk, float32."""
    folder = tmp_path_factory.mktemp("tiny")
    for name, model in MODELS.items():
        model.build(folder / name)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="session")
def tiny(repositories) -> Path:
    """A tiny FluxKontextPipeline on disk, float32."""
    return repositories["flux_kontext"]


@pytest.fixture
def stock(tiny):
    """The same as diffusers loads it."""
    from diffusers import FluxKontextPipeline

    pipeline = FluxKontextPipeline.from_pretrained(tiny)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """Eight pairs of 32x32."""
    return make_pairs(tmp_path_factory.mktemp("pairs"), [(32, 32)] * 8)


@pytest.fixture
def run(monkeypatch, capfd):
    """Run train.py or predict.py with overrides, in this process but by its real command line."""

    def run(script: str, *overrides: str, ok: bool = True) -> Outcome:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, overrides)])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        status = 0
        try:
            # What Lightning tells its processes (MASTER_PORT) is not for those of a later test. Hydra would compose all
            # settings once more to find the mode, which no YAML sets.
            with mock.patch.dict(os.environ), mock.patch.object(Hydra, "get_mode", return_value=None):
                {"train": train, "predict": predict}[script].main()
        except SystemExit as stop:
            status = stop.code
        text = "".join(capfd.readouterr())
        assert not ok or status == 0, text
        return Outcome(status, text)

    return run


@pytest.fixture(scope="session")
def learned(tiny, pairs, tmp_path_factory):
    """For each adapter= a run whose weights visibly change pictures, alpha different from rank."""

    @functools.cache
    def learned(adapter: str) -> Path:
        folder = tmp_path_factory.mktemp("learned") / adapter
        settings = [f"adapter={adapter}", "adapter.alpha=8", "optimizer.lr=3e-2", "scheduler=constant"]
        process = Warm("train", *short(tiny, pairs, folder, 8), *settings)
        text, _ = process.communicate(timeout=300)
        process.end()
        assert process.returncode == 0, text
        return folder

    return learned


@pytest.fixture
def start():
    """Start train.py or predict.py as a process of its own, in a session of its own."""
    processes = []

    def start(script: str, *overrides: str, **more: Any) -> Warm:
        processes.append(Warm(script, *overrides, **more))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


@pytest.fixture
def in_two_processes(start):
    """The status and the text of two processes such as torchrun starts, for several runs one after the other."""

    def in_two_processes(runs):
        ranks = start_two(start, runs)
        texts = [rank.communicate(timeout=300)[0] for rank in ranks]
        return max(rank.returncode for rank in ranks), "".join(texts)

    return in_two_processes


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """For each model= six samples, one of them of another size, their captions of different lengths."""
    folders = {}
    for model, tiny in MODELS.items():
        folders[model] = root = tmp_path_factory.mktemp(model)
        targets, controls = root / "training_images", root / "control_images"
        for folder in (targets, controls):
            folder.mkdir()
        for i in range(6):
            name = ("astronaut", "chelsea", "coffee")[i % 3]
            photograph(name, *((48, 48) if i == 5 else (64, 32))).save(targets / f"{i}.png")
            (targets / f"{i}.txt").write_text("make it snow" + " and rain" * i)
            for k, (width, height) in enumerate(tiny.controls[: 1 if i == 4 else None]):
                picture = photograph(("rocket", "retina")[k], width, height).transpose(Image.Transpose(i % 2))
                picture.save(controls / (f"{i}.png" if k == 0 else f"{i}_control_{k}.png"))
        if not tiny.controls:
            folders[model] = targets
    return folders


@pytest.fixture
def arguments(repositories, datasets):
    """Overrides of a short quiet run."""

    def arguments(model, output, steps, *more, shown=False):
        common = short(repositories[model], datasets[model], output, steps, MODELS[model].data, shown)
        return [f"model={model}", "model.dtype=float32", *common, *MODELS[model].settings, *more]

    return arguments


@pytest.fixture
def mixed(tmp_path):
    """Two sizes, one with a second control of a size of its own, masks, prompts of very different lengths."""
    root = make_pairs(tmp_path / "mixed", [(32, 32)] * 4 + [(48, 32)] * 4)
    for number in range(4, 8):
        photograph("coffee", 64, 32).save(root / "control_images" / f"{number:02d}_control_1.png")
        photograph("chelsea", 48, 32).save(root / "control_images" / f"{number:02d}_mask.png")
    (root / "training_images" / "01.txt").write_text("snow " * 10)
    (root / "training_images" / "02.txt").write_text("")
    return root


@pytest.fixture
def trained(learned):
    """A run whose LoRA visibly changes pictures."""
    return learned("lora")


@pytest.fixture
def photo(tmp_path):
    """A picture on disk, 48x32."""
    photograph("coffee", 48, 32).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def fails(run, tiny, pairs, tmp_path):
    """Run train.py with more overrides than a good run has; returns the error's line."""

    def fails(*overrides, root=pairs, output=tmp_path / "run"):
        arguments = [a for a in short(tiny, root, output, 2, shown=True) if a != "logger=none"]
        line = run("train", *arguments, *overrides, ok=False).error
        assert not output.exists(), "a run that did not start leaves no folder"
        return line

    return fails
