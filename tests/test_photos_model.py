"""The embedded model: what it does with photographs that it has never seen, and what a LoRA teaches it."""

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image, ImageChops

from benchmarks.photos.base import Base, held_out, measured, psnr
from lightning_modules.pretrained.repository import PHOTOS
from tests.support.commands import ROOT, rows


def test_folder_is_small_and_in_bf16():
    files = [path for path in PHOTOS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12e6
    weights = [safetensors.torch.load_file(path) for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 4
    assert {tensor.dtype for one in weights for tensor in one.values()} == {torch.bfloat16}


def test_card_edits_a_photograph_in_the_stock_pipeline_as_predict_does(run, tmp_path, monkeypatch):
    card = (PHOTOS / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(code, names)
    command = re.search(r"python predict.py\s+(image=\S+)\s+prompt=\"([^\"]+)\"", card)
    run("predict", command[1], f"prompt={command[2]}", "seed=0", f"output_dir={tmp_path}")
    [picture] = Path(tmp_path).glob("*.png")
    assert max(high for _, high in ImageChops.difference(Image.open(picture), names["edited"]).getextrema()) <= 1


@pytest.mark.slow
def test_knows_its_instructions_on_photographs_that_it_has_never_seen():
    """The whole table is in assets/photos/README.md."""
    base, images = Base(PHOTOS, 128), held_out(15, 128)
    assert sum(map(psnr, images, base.decoded(images))) / len(images) >= 34
    names = ["copy", "brighter", "sepia", "negative", "mirror"]
    found = {row.name: row for row, *_ in measured(base, images, names)}
    assert found.pop("copy").result >= 32
    for row in found.values():
        assert row.result > row.limit - 4, row
        assert row.result > row.unedited + 3, row


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "tlora"])
def test_learns_a_sunset(run, tmp_path, adapter):
    short = ["data.resolution=64", "trainer.max_steps=100", "optimizer.lr=5e-3", "sample_every=0", "logger=none"]
    run("train", f"adapter={adapter}", *short, f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}")
    before, after = rows(tmp_path / "run")
    assert before["step"] == 0
    assert after["psnr"] > before["psnr"] + 6
    assert after["psnr"] > after["psnr_nothing"] + 6
