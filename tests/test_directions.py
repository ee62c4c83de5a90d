"""Sliders and preferences by the command line: caches, refusals, and the strip of a slider."""

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image, ImageOps

from datamodules.pairs import collate_pixels
from lightning_modules.lora_files.reading import LoRAFile
from tasks.encode import build_cache
from tests.support.combinations import first
from tests.support.commands import compose, short
from tests.support.objectives import losses
from tests.support.pictures import make_pairs, photograph, pixels

SLIDER = ["objective=slider", "optimizer.lr=3e-2", "scheduler=constant"]


@pytest.fixture(scope="module")
def preferences(tmp_path_factory):
    """Pairs of two sizes, each with a rejected image, two of them with a mask."""
    root = make_pairs(tmp_path_factory.mktemp("preferences"), [(32, 32), (48, 32), (32, 32), (48, 32)] * 2)
    (root / "rejected_images").mkdir()
    for path in sorted((root / "training_images").glob("*.png")):
        ImageOps.invert(Image.open(path)).save(root / "rejected_images" / path.name)
    for name in ("02", "06"):
        photograph("chelsea", 32, 32).save(root / "control_images" / f"{name}_mask.png")
    return root


@pytest.mark.parametrize(("objective", "vae_encode_mode"), first(1, [("dpo", "sample"), ("slider", "mode")]))
def test_cached_latents_have_the_loss_of_encoded_images(run, tiny, preferences, tmp_path, objective, vae_encode_mode):
    overrides = [*short(tiny, preferences, tmp_path / "run", 2), f"model.vae_encode_mode={vae_encode_mode}"]
    cfg = compose("train", *overrides, f"objective={objective}")
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    build_cache(cfg, data)
    data.open(data.cache(module))
    module.configure_model()
    read, raw = data.reader(False), list(data.pixels(data.training, slice(8)))
    for numbers in ([0, 4], [1, 3], [2, 6]):
        for number in numbers:
            raw[number].draws = [100 + number]
        with torch.no_grad():
            cached = losses(module, read([(number, 100 + number) for number in numbers]))
            encoded = losses(module, module.encoder(collate_pixels([raw[number] for number in numbers])))
        torch.testing.assert_close(cached, encoded, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("objective", first(1, ["slider", "dpo"]))
def test_no_step_waits_for_the_device(run, tiny, preferences, tmp_path, watch, objective):
    """Shards alone have the rejected images as well."""
    cfg = compose("train", *short(tiny, preferences, tmp_path / "run", 3), f"data.cache_dir={tmp_path}")
    shards = build_cache(cfg, instantiate(cfg.data)).folder
    quiet = ["trainer.log_every_n_steps=3", "save_every=0", f"data.shards={shards}"]
    run("train", *short(tiny, "null", tmp_path / "run", 3), *quiet, f"objective={objective}")
    assert not watch.found[2]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective=dpo"], "which 00, 01, 02 and 5 more lack. Add rejected_images/"),
        (["objective=dpo", "objective.beta=0"], "objective.beta=0: must be a number above 0"),
    ],
)
def test_incompatible_settings_are_refused(refuses, overrides, words):
    refuses(*overrides, words=words)


def test_slider_on_images_of_two_sizes_is_refused(refuses, tmp_path):
    root = make_pairs(tmp_path / "sizes", [(32, 32)] * 2)
    photograph("coffee", 48, 32).save(root / "control_images" / "01.png")
    refuses(f"data.root={root}", "objective=slider", words="a sample's are 48x32 and 32x32. Use")


@pytest.mark.slow
def test_prediction_with_a_slider_is_a_strip_from_minus_two_to_two(run, runs, photo, tmp_path):
    slider = runs(3, *SLIDER).folder
    request = [f"image={photo}", "prompt=make it snow", "num_inference_steps=1"]
    outcome = run("predict", f"lora={slider}", *request, f"output_dir={tmp_path / 'dial'}")
    assert "a slider: images from lora_scale=-2 to 2; lora_scale=1 makes only one" in outcome.text
    assert LoRAFile(slider / "lora" / "last" / "pytorch_lora_weights.safetensors").header["objective"] == "slider"
    made = {n: tmp_path / "dial" / f"photo_p00_img00_steps1_g2.5_lora{n}.0.png" for n in (-2, -1, 0, 1, 2)}
    assert set((tmp_path / "dial").glob("*.png")) == set(made.values())
    [strip] = (tmp_path / "dial" / "strips").glob("*.png")
    assert strip.name == "photo_p00_img00_steps1_g2.5.png"
    # The image and five results of 48x32, three times as large, with six pixels between them.
    strip = pixels(strip)
    assert strip.shape == (30 + 96, 6 * 144 + 5 * 6, 3)
    shown = [strip[30:, left : left + 144][1::3, 1::3] for left in range(0, 6 * 150, 150)]
    for one, other in zip(shown, map(pixels, [photo, *made.values()]), strict=True):
        assert np.array_equal(one, other)
    run("predict", f"lora={slider}", *request, "lora_scale=1", f"output_dir={tmp_path / 'one'}")
    assert [path.name for path in (tmp_path / "one").glob("**/*.png")] == ["photo_p00_img00_steps1_g2.5_lora1.0.png"]
