"""Sliders and preferences by the command line: runs, resumed and in two processes; caches; refusals; strips."""

import shutil

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image, ImageOps

from datamodules.pairs import collate_pixels
from lightning_modules.lora_files.reading import LoRAFile
from tasks.encode import build_cache
from tests.support.caches import cache_overrides, only
from tests.support.combinations import first
from tests.support.commands import compose, lora_bytes, metrics, short
from tests.support.losses import losses
from tests.support.pictures import make_pairs, photograph, pixels
from tests.support.same_runs import SMOOTH_ADAM, assert_close, assert_close_losses
from tests.support.several_runs import DDP

SLIDER = ["objective=slider", "optimizer.lr=3e-2", "scheduler=constant"]
DPO = ["objective=dpo", "scheduler=constant"]
OBJECTIVES = {"slider": SLIDER, "dpo": DPO}
EVERY = pytest.mark.parametrize("objective", OBJECTIVES)


@pytest.fixture(scope="module")
def preferences(tmp_path_factory):
    """Pairs of two sizes, each with a rejected picture, two of them with a mask."""
    root = make_pairs(tmp_path_factory.mktemp("preferences"), [(32, 32), (48, 32), (32, 32), (48, 32)] * 2)
    (root / "rejected_images").mkdir()
    for path in sorted((root / "training_images").glob("*.png")):
        ImageOps.invert(Image.open(path)).save(root / "rejected_images" / path.name)
    for name in ("02", "06"):
        photograph("chelsea", 32, 32).save(root / "control_images" / f"{name}_mask.png")
    return root


@pytest.mark.parametrize("objective", first(1, ["dpo", "slider"]))
def test_resumed_run_is_bitwise_the_uninterrupted_one(run, tiny, preferences, tmp_path, objective):
    settings = [*OBJECTIVES[objective], "adapter=tlora", "data.batch_size=2", "trainer.accumulate_grad_batches=2"]
    settings += ["data.caption_dropout_rate=0.3", "model.gradient_checkpointing=full"]
    run("train", *short(tiny, preferences, tmp_path / "whole", 3), *settings)
    run("train", *short(tiny, preferences, tmp_path / "halves", 2), *settings)
    run("train", *short(tiny, preferences, tmp_path / "halves", 3), *settings, "ckpt_path=last")
    assert lora_bytes(tmp_path / "halves") == lora_bytes(tmp_path / "whole")
    assert len({row["loss"] for row in metrics(tmp_path / "whole")}) == 3


@pytest.mark.slow
def test_two_processes_that_accumulate_are_one_with_the_batch_of_all(run, in_two_processes, tiny, pairs, tmp_path):
    root = shutil.copytree(pairs, tmp_path / "pairs")
    (root / "rejected_images").mkdir()
    for path in sorted((root / "training_images").glob("*.png")):
        ImageOps.invert(Image.open(path)).save(root / "rejected_images" / path.name)

    def overrides(objective, name, *more):
        settings = ["optimizer.lr=1e-3", SMOOTH_ADAM, "data.caption_dropout_rate=0", *more]
        return [*short(tiny, root, tmp_path / objective / name, 2), *OBJECTIVES[objective], *settings]

    for objective in OBJECTIVES:
        run("train", *overrides(objective, "one", "data.batch_size=4"))
    accumulated = [*DDP, "trainer.accumulate_grad_batches=2"]
    status, text = in_two_processes([overrides(objective, "two", *accumulated) for objective in OBJECTIVES])
    assert status == 0, text
    for objective in OBJECTIVES:
        assert_close(tmp_path / objective / "one", tmp_path / objective / "two")
        assert_close_losses(tmp_path / objective / "one", tmp_path / objective / "two")


@pytest.mark.parametrize(("objective", "vae_encode_mode"), first(1, [("dpo", "sample"), ("slider", "mode")]))
def test_cached_latents_give_the_loss_of_pictures(run, tiny, preferences, tmp_path, objective, vae_encode_mode):
    overrides = [*short(tiny, preferences, tmp_path / "run", 2), f"model.vae_encode_mode={vae_encode_mode}"]
    cfg = compose("train", *overrides, f"objective={objective}")
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    build_cache(cfg, data)
    data.open(data.cache(module))
    module.configure_model()
    read, raw = data.reader(False), data.pixels(8)
    for numbers in ([0, 4], [1, 3], [2, 6]):
        for number in numbers:
            raw[number].draws = [100 + number]
        with torch.no_grad():
            cached = losses(module, read([(number, 100 + number) for number in numbers]))
            encoded = losses(module, module.encoder(collate_pixels([raw[number] for number in numbers])))
        torch.testing.assert_close(cached, encoded, rtol=1e-6, atol=1e-6)


@EVERY
def test_no_step_waits_for_the_device(run, tiny, preferences, tmp_path, watch, objective):
    quiet = ["trainer.log_every_n_steps=3", "save_every=0"]
    run("train", *short(tiny, preferences, tmp_path / "run", 3), *quiet, *OBJECTIVES[objective])
    assert not watch.found[2]


def test_shards_alone_and_streamed_train_like_their_pictures(run, tiny, preferences, tmp_path):
    """A cache knows which of its samples have rejected pictures, as files and as a stream."""
    run("predict", *cache_overrides(tiny, preferences, tmp_path / "cache"))
    cache = only(tmp_path / "cache").folder
    for name, shards in (("folder", cache), ("stream", f"file://{cache}")):
        overrides = [a for a in short(tiny, "", tmp_path / name, 1) if not a.startswith("data.root=")]
        run("train", *overrides, f"data.shards={shards}", *DPO)
        assert all(0 < float(row["loss"]) < 2 for row in metrics(tmp_path / name))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective=dpo"], "which 00, 01, 02 and 5 more lack. Add rejected_images/"),
        (["objective=dpo", "objective.beta=0"], "objective.beta=0: must be a number above 0"),
    ],
)
def test_incompatible_settings_are_refused(refuses, overrides, words):
    refuses(*overrides, words=words)


@pytest.mark.parametrize(
    ("objective", "words"),
    [("slider", "needs an adapter whose update can be negated"), ("dpo", "adapter=full changes the base")],
)
def test_full_fine_tuning_has_no_direction(run, tiny, pairs, tmp_path, objective, words):
    common = [one for one in short(tiny, pairs, tmp_path / "run", 1) if one != "adapter.rank=4"]
    assert words in run("train", *common, "adapter=full", f"objective={objective}", ok=False).error


@pytest.mark.parametrize(
    ("model", "words"),
    [("flux_dev", "takes no image to edit"), ("qwen_image_edit_plus", "the text encoder of QwenImageEditPlusPipeline")],
)
def test_slider_on_a_model_that_cannot_be_turned_is_refused(run, arguments, tmp_path, model, words):
    outcome = run("train", *arguments(model, tmp_path / "run", 1), "objective=slider", ok=False)
    assert words in outcome.error
    assert "loading" not in outcome.text


@pytest.mark.parametrize("task", ["fit", "dry_run"])
def test_slider_on_images_of_two_sizes_or_with_two_controls_is_refused(refuses, tmp_path, task):
    sizes, several = (make_pairs(tmp_path / name, [(32, 32)] * 2) for name in ("sizes", "several"))
    photograph("coffee", 48, 32).save(sizes / "control_images" / "01.png")
    photograph("coffee", 32, 32).save(several / "control_images" / "01_control_1.png")
    for root, words in ((sizes, "a sample's are 48x32 and 32x32. Use"), (several, "has 2")):
        refuses(f"data.root={root}", f"task={task}", "objective=slider", words=words)


def test_rejected_pictures_are_left_alone_without_dpo(run, runs, tiny, pairs, tmp_path):
    """With a note; what is learned is what is learned without them."""
    root = shutil.copytree(pairs, tmp_path / "pairs")
    shutil.copytree(root / "control_images", root / "rejected_images")
    outcome = run("train", *short(tiny, root, tmp_path / "with", 2))
    assert "note: samples have rejected images, which objective=dpo learns from; here they are unused" in outcome.text
    assert lora_bytes(tmp_path / "with") == lora_bytes(runs(2).folder)


@pytest.fixture
def slider(runs):
    """Return the folder of a run of a slider."""
    return runs(3, *SLIDER).folder


def test_prediction_with_a_slider_is_a_strip_from_minus_two_to_two(run, slider, photo, tmp_path):
    request = [f"image={photo}", "prompt=make it snow", "num_inference_steps=1"]
    outcome = run("predict", f"lora={slider}", *request, f"output_dir={tmp_path / 'dial'}")
    assert "a slider: images from lora_scale=-2 to 2; lora_scale=1 makes only one" in outcome.text
    assert LoRAFile(slider / "lora" / "last" / "pytorch_lora_weights.safetensors").header["objective"] == "slider"
    made = {n: tmp_path / "dial" / f"photo_p00_img00_steps1_g2.5_lora{n}.0.png" for n in (-2, -1, 0, 1, 2)}
    assert set((tmp_path / "dial").glob("*.png")) == set(made.values())
    [strip] = (tmp_path / "dial" / "strips").glob("*.png")
    assert strip.name == "photo_p00_img00_steps1_g2.5.png"
    # The picture and five results of 48x32, three times as large, with six pixels between them.
    strip = pixels(strip)
    assert strip.shape == (30 + 96, 6 * 144 + 5 * 6, 3)
    shown = [strip[30:, left : left + 144][1::3, 1::3] for left in range(0, 6 * 150, 150)]
    for one, other in zip(shown, map(pixels, [photo, *made.values()]), strict=True):
        assert np.array_equal(one, other)
    run("predict", f"lora={slider}", *request, "lora_scale=1", f"output_dir={tmp_path / 'one'}")
    assert [path.name for path in (tmp_path / "one").glob("**/*.png")] == ["photo_p00_img00_steps1_g2.5_lora1.0.png"]


def test_other_loras_make_one_picture_and_lists_a_strip(run, trained, photo, tmp_path):
    request = [f"lora={trained}", f"image={photo}", "prompt=make it snow", "num_inference_steps=1"]
    run("predict", *request, f"output_dir={tmp_path / 'one'}")
    assert len(list((tmp_path / "one").glob("**/*.png"))) == 1
    run("predict", *request, "lora_scale=[0,0.5]", f"output_dir={tmp_path / 'two'}")
    [strip] = (tmp_path / "two" / "strips").glob("*.png")
    assert pixels(strip).shape == (30 + 96, 3 * 144 + 2 * 6, 3)
