"""The embedded model: what it can do, and what a LoRA teaches it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from diffusers import FluxKontextPipeline
from PIL import Image, ImageChops

from benchmarks.shapes.base import right_image
from benchmarks.shapes.drawings import Scene, Shape, draw
from lightning_modules.pretrained.repository import SHAPES
from tests.support.commands import ROOT, rows

STAR = Shape("star", "yellow", 20, 22, 12)
EXAMPLE = Scene("blue", (STAR, Shape("circle", "orange", 44, 16, 10), Shape("square", "white", 40, 46, 12)))


def share_close(picture: Image.Image, target: Image.Image, where: np.ndarray) -> float:
    """Return the share of pixels within 48 of the target in each channel."""
    difference = np.asarray(ImageChops.difference(picture.convert("RGB"), target)).max(-1)
    return float((difference[where] <= 48).mean())


def test_folder_is_small_and_in_bf16():
    files = [path for path in SHAPES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 8e6
    weights = [safetensors.torch.load_file(path) for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 4
    assert {tensor.dtype for one in weights for tensor in one.values()} == {torch.bfloat16}


def test_card_edits_an_image_in_the_stock_pipeline_as_predict_does(run, tmp_path, monkeypatch):
    example = Image.open(SHAPES / "example.png")
    assert ImageChops.difference(example, draw(EXAMPLE)).getbbox() is None
    card = (SHAPES / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(code, names)
    target = draw(EXAMPLE.changed(STAR, replace(STAR, color="red")))
    changed = np.asarray(ImageChops.difference(example, target)).max(-1) > 24
    assert share_close(names["edited"], target, changed) >= 0.85
    assert share_close(names["edited"], target, ~changed) >= 0.97
    command = re.search(r"python predict.py\s+(image=\S+)\s+prompt=\"([^\"]+)\"", card)
    run("predict", command[1], f"prompt={command[2]}", "seed=0", f"output_dir={tmp_path}")
    [picture] = Path(tmp_path).glob("*.png")
    assert max(high for _, high in ImageChops.difference(Image.open(picture), names["edited"]).getextrema()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "settings"),
    [
        ("segment", ["adapter=lora", "optimizer.lr=5e-3"]),
        ("segment", ["adapter=tlora", "optimizer.lr=5e-3"]),
        ("invert", ["adapter=lora", "optimizer.lr=1.5e-2", "scheduler=constant"]),
    ],
)
def test_lora_learns_an_edit_that_the_base_does_not_have(run, tmp_path, edit, settings):
    """The settings are the best ones of docs/quality.md."""
    short = ["trainer.max_steps=100", "sample_every=0", "logger=none", "callbacks.sample_images.count=4"]
    short += [f"data.source.edits=[{edit}]", *settings]
    short.append("+callbacks.validation.metrics.mask_iou._target_=benchmarks.shapes.mask_iou.MaskIoU")
    run("train", f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}", *short)
    before, after = rows(tmp_path / "run")
    assert before["step"] == 0
    assert after["val_loss"] < 0.15 * before["val_loss"]
    assert after["psnr"] > before["psnr"] + 10
    assert after["psnr"] > after["psnr_nothing"] + 10
    if edit == "segment":
        assert before["mask_iou"] < 0.2 < 0.7 < after["mask_iou"]


def test_makes_images_from_captions_in_the_stock_pipeline_and_predict_gives_the_same(run, tmp_path):
    prompt = "a red star top left and a blue square on green"
    pipe = FluxKontextPipeline.from_pretrained(SHAPES, dtype=torch.float32)
    sizes = {"height": 64, "width": 64, "max_area": 64 * 64, "_auto_resize": False}
    settings = {"num_inference_steps": 10, "max_sequence_length": 16, "generator": torch.Generator().manual_seed(0)}
    made = pipe(prompt=prompt, negative_prompt="", true_cfg_scale=3.0, **sizes, **settings).images[0]
    assert right_image(np.asarray(made, dtype=np.float32), prompt)
    request = ["width=64", "height=64", "seed=0", "true_cfg_scale=3", "negative_prompt="]
    run("predict", f"prompt={prompt}", *request, f"output_dir={tmp_path}")
    [picture] = Path(tmp_path).glob("*.png")
    assert max(high for _, high in ImageChops.difference(Image.open(picture), made).getextrema()) <= 1
