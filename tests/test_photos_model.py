"""The embedded model: what it does with photographs that it has never seen, and what a LoRA teaches it."""

import csv
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageChops

from benchmarks.photos.base import Base, held_out, measured, psnr
from benchmarks.photos.runs import SNOW
from lightning_modules.pretrained.repository import PHOTOS
from tests.support.commands import ROOT, rows


def test_folder_is_small_and_in_bf16():
    files = [path for path in PHOTOS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12e6
    weights = [safetensors.torch.load_file(path) for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 4
    assert {tensor.dtype for one in weights for tensor in one.values()} == {torch.bfloat16}


def test_every_included_photograph_is_free_and_held_out_ones_are_not_trained_on():
    with (SNOW / "licences.csv").open(encoding="utf-8") as table:
        listed = {row["photograph"]: row["licence"] for row in csv.DictReader(table)}
    there = {path.relative_to(SNOW) for path in SNOW.rglob("control_images/*.jpg")}
    assert {f"{path.parts[0]}/{path.stem}" for path in there} == listed.keys()
    assert set(listed.values()) == {"CC0", "public domain"}
    assert len({path.stem for path in there}) == len(there)


def test_encoder_is_the_principal_components(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "assets")
    from photos_autoencoder import CHANNELS, WIDTHS, encoded, principal_components, set_encoder

    images = held_out(6, 64)
    pixels = torch.stack([torch.tensor(list(image.tobytes())).view(64, 64, 3).permute(2, 0, 1) for image in images])
    pixels = pixels / 127.5 - 1
    mean, basis = principal_components(pixels)
    config = AutoencoderKL.load_config(PHOTOS / "vae")
    assert (config["latent_channels"], tuple(config["block_out_channels"])) == (CHANNELS, WIDTHS)
    vae = AutoencoderKL.from_config(config)
    set_encoder(vae.encoder, mean, basis)
    latents = vae.encode(pixels).latent_dist
    torch.testing.assert_close(latents.mode(), encoded(pixels, mean, basis), atol=1e-3, rtol=1e-3)
    assert float(latents.std.max()) < 1e-5


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
    base, images = Base(PHOTOS, 128), held_out(10, 128)
    assert sum(map(psnr, images, base.decoded(images))) / len(images) >= 34
    names = ["copy", "brighter", "sepia", "vignette", "red to blue"]
    found = {row.name: row for row, *_ in measured(base, images, names)}
    assert found.pop("copy").result >= 32
    for row in found.values():
        assert row.result > row.limit - 4, row
        assert row.result > row.unedited + 3, row


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "tlora"])
def test_learns_snow(run, tmp_path, adapter):
    short = ["data.resolution=64", "trainer.max_steps=100", "optimizer.lr=5e-3", "sample_every=0", "logger=none"]
    run("train", f"adapter={adapter}", *short, f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}")
    before, after = rows(tmp_path / "run")
    assert before["step"] == 0
    assert after["psnr"] > before["psnr"] + 5
    assert after["psnr"] > after["psnr_nothing"] + 5
