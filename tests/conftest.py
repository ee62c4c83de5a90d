"""Tiny real pipelines and real photographs, offline."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same suite, whatever the machine has
os.environ["OMP_NUM_THREADS"] = "1"  # two workers on two cores
os.environ["COLUMNS"] = "250"  # long paths stay on one line

import hydra
import pytest
import skimage.data
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict
from peft import LoraConfig
from PIL import Image

import predict
import train
from lightning_modules.adapters.lora import adapter_state
from tests.support.tiny_pipelines import MODELS

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)
# What is imported stays: the garbage collection after each run need not look through it.
gc.freeze()


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


def randomize(transformer: torch.nn.Module) -> None:
    """Make the second half of a fresh adapter, which is zero, as random as the first."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in transformer.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def adapt_like(transformer: torch.nn.Module, own: torch.nn.Module) -> None:
    """Give a stock transformer, by peft alone, the adapter of ours (rank 4, alpha 6)."""
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    weights = adapter_state(own)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = weights[name.replace(".default", "")].clone()


def assert_same_gradients(own: torch.nn.Module, stock: torch.nn.Module) -> None:
    """Of the adapters of two transformers."""
    ours, theirs = ({n: p.grad for n, p in one.named_parameters() if p.requires_grad} for one in (own, stock))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def shrink_condition_images(monkeypatch, vae: int, condition: int) -> None:
    """Let the stock Qwen pipelines resize condition images to fewer pixels than their own, to save time."""
    dimensions = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda _, ratio: dimensions(vae, ratio))
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", vae)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", condition)


def photograph(name: str, width: int, height: int) -> Image.Image:
    """A real photograph, scaled."""
    return Image.fromarray(getattr(skimage.data, name)()).resize((width, height), Image.Resampling.LANCZOS)


def make_pairs(root: Path, sizes, target=lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) -> Path:
    """Pairs in folders: photographs, and the same mirrored."""
    for folder in ("training_images", "control_images"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    names = ("astronaut", "chelsea", "coffee", "rocket", "retina")
    for i, (width, height) in enumerate(sizes):
        image = photograph(names[i % len(names)], width + i, height).crop((i, 0, width + i, height))
        image.save(root / "control_images" / f"{i:02d}.png")
        target(image).save(root / "training_images" / f"{i:02d}.png")
        (root / "training_images" / f"{i:02d}.txt").write_text(f"mirror picture {i}")
    return root


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """Eight pairs of 32x32."""
    return make_pairs(tmp_path_factory.mktemp("pairs"), [(32, 32)] * 8)


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


@pytest.fixture
def run(monkeypatch, capfd):
    """Run train.py or predict.py with overrides, in this process but by its real command line."""

    def run(script: str, *overrides: str, ok: bool = True) -> Outcome:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, overrides)])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        status = 0
        try:
            # What Lightning tells its processes (MASTER_PORT) is not for those of a later test.
            with mock.patch.dict(os.environ):
                {"train": train, "predict": predict}[script].main()
        except SystemExit as stop:
            status = stop.code
        text = "".join(capfd.readouterr())
        assert not ok or status == 0, text
        return Outcome(status, text)

    return run


def start(script: str, *overrides: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen:
    """Start train.py or predict.py as a process of its own."""
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


def short(tiny: Path, pairs: Path, output: Path, steps: int, data: str = "cached") -> list[str]:
    """Overrides of a short quiet run."""
    cache = [f"data.cache_dir={output.parent / 'cache'}"] if data != "pairs" else []
    return [
        f"data={data}",
        *cache,
        f"model.pretrained_model_name_or_path={tiny}",
        f"data.root={pairs}",
        f"output_dir={output}",
        f"trainer.max_steps={steps}",
        "trainer.accelerator=cpu",
        "data.num_workers=0",
        "adapter.rank=4",
        "logger=none",
        "callbacks.sample_images=null",
    ]


def lora_bytes(run: Path, name: str = "last") -> bytes:
    return (run / "lora" / name / "pytorch_lora_weights.safetensors").read_bytes()


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

    def arguments(model, output, steps, *more):
        common = short(repositories[model], datasets[model], output, steps, MODELS[model].data)
        return [f"model={model}", "model.dtype=float32", *common, *MODELS[model].settings, *more]

    return arguments
