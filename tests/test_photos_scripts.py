"""The scripts that make Photos, and the photographs that are included."""

import csv

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from benchmarks.photos.runs import SUNSET
from lightning_modules.pretrained.repository import PHOTOS
from tests.support.commands import ROOT


def test_every_included_photograph_is_free_and_listed():
    with (SUNSET / "licences.csv").open(encoding="utf-8") as table:
        listed = {row["photograph"]: row["licence"] for row in csv.DictReader(table)}
    there = [path.relative_to(SUNSET) for path in SUNSET.rglob("control_images/*.jpg")]
    assert sorted(f"{path.parts[0]}/{path.stem}" for path in there) == sorted(listed)
    assert set(listed.values()) == {"CC0", "public domain"}
    assert len({path.stem for path in there}) == len(there), "one is in training and held out"


def test_held_out_photographs_train_nothing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "assets")
    from photos_sources import Photograph, not_held_out

    names = [path.stem for path in SUNSET.glob("held_out/control_images/*.jpg")]
    assert len(names) == 8
    found = [Photograph(name, Image.new("RGB", (1, 1)), ("", "", "")) for name in (*names, "forest_01")]
    assert [one.name for one in not_held_out(found)] == ["forest_01"]


def test_encoder_is_exactly_the_principal_components(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "assets")
    from photos_autoencoder import encoded, principal_components, set_encoder, untrained_autoencoder
    from photos_pairs import Photographs, held_out_photographs

    pixels = Photographs(held_out_photographs(), seed=0).batch(6, 64)
    mean, basis = principal_components(pixels)
    vae = untrained_autoencoder()
    known = AutoencoderKL.load_config(PHOTOS / "vae")
    assert vae.config["latent_channels"] == known["latent_channels"]
    assert [*vae.config["block_out_channels"]] == known["block_out_channels"]
    set_encoder(vae.encoder, mean, basis)
    latents = vae.encode(pixels).latent_dist
    torch.testing.assert_close(latents.mode(), encoded(pixels, mean, basis), atol=1e-3, rtol=1e-3)
    assert float(latents.std.detach().max()) < 1e-5


def test_edits_are_exact_and_pairs_are_a_function_of_the_seed(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "assets")
    from photos_pairs import EDITS, PLAIN, Photographs, edit, held_out_photographs, pair

    photographs = Photographs(held_out_photographs(), seed=0)
    image = photographs.crop(64, 64)
    pixels, random = np.asarray(image, float) / 255, np.random.default_rng(0)
    for name, expected in {"brighter": pixels**0.6, "negative": 1 - pixels, "mirror": pixels[:, ::-1]}.items():
        made = edit(image, random, name)
        assert np.abs(np.asarray(made.target, float) / 255 - expected).max() < 0.01
        assert made.prompt in PLAIN[name].prompts.split(" | ")
    for other in (image, photographs.crop(80, 48), photographs.crop(48, 80)):
        assert all(made.draw(other).size == other.size for made in EDITS.values())
    one, same = ([pair(image, np.random.default_rng(seed)) for seed in range(20)] for _ in range(2))
    for a, b in zip(one, same, strict=True):
        assert (a.prompt, a.control.tobytes(), a.target.tobytes()) == (
            b.prompt,
            b.control.tobytes(),
            b.target.tobytes(),
        )
