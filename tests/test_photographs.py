"""Photographs as people have them: of any size and proportions, with settings of their roots, in all ways to train."""

import re

import pytest
from PIL import Image, ImageOps

from tests.support.caches import cache_overrides, only
from tests.support.commands import lora_bytes, metrics, run_task, short
from tests.support.pictures import photograph
from tests.support.same_runs import assert_close, assert_close_losses, column

ORIENTATION = 0x0112


def album(root, sizes, captions=("invert the colors",), folders=("control_images", "training_images")):
    """Pairs of JPEGs, every third turned by EXIF as a phone does."""
    for folder in folders:
        (root / folder).mkdir(parents=True)
    for number, (width, height) in enumerate(sizes):
        image = photograph(("astronaut", "coffee", "chelsea")[number % 3], width, height)
        exif = Image.Exif()
        exif[ORIENTATION] = 6 if number % 3 == 2 else 1
        for folder, shown in zip(folders, (image, ImageOps.invert(image)), strict=True):
            shown.save(root / folder / f"{number:02d}.jpg", quality=90, exif=exif)
        (root / "training_images" / f"{number:02d}.txt").write_text("\n".join(captions))
    return root


@pytest.fixture(scope="module")
def two_roots(tmp_path_factory):
    """Seven pairs of mixed proportions with several captions, and three small ones."""
    folder = tmp_path_factory.mktemp("albums")
    mine = [(200, 150), (150, 200), (160, 120), (210, 140), (300, 100), (140, 140), (128, 100)]
    album(folder / "mine", mine, ["invert it", "negative, please", "make a negative of this picture"])
    album(folder / "others", [(70, 70), (100, 80), (64, 64)], ["invert the colors"])
    return folder


@pytest.mark.slow
def test_streamed_is_cached_and_resumed(run, tiny, two_roots, tmp_path):
    """Resolutions, buckets, crops, flips, repeats, weights, prefixes and several captions are used all at once."""
    roots = f"[{{path: {two_roots}/mine, repeats: 2, resolution: [64, 96]}}, {{path: {two_roots}/others, weight: 0.25, "
    roots += "prefix: 'sks '}]"
    settings = ["data.resolution=64", "data.buckets=aspect", "data.crop=random_cached", "data.crop_count=2"]
    settings += ["data.flip=true", "model.max_sequence_length=32", "scheduler=cosine"]

    def overrides(name, data="cached"):
        return [*short(tiny, roots, tmp_path / name, 6, data), *settings]

    text = run("train", *overrides("cached")).text
    assert re.search(r"10 pairs in \d\d views", text)
    run("train", *overrides("streamed", "pairs"))
    assert_close_losses(tmp_path / "cached", tmp_path / "streamed")
    assert_close(tmp_path / "cached", tmp_path / "streamed")
    assert len(set(column(tmp_path / "cached", "loss"))) == 6

    run("train", *overrides("resumed"), "trainer.max_steps=3", "scheduler.num_training_steps=6")
    run("train", *overrides("resumed"), "ckpt_path=last")
    assert lora_bytes(tmp_path / "resumed") == lora_bytes(tmp_path / "cached")


def test_only_what_changes_is_encoded_again(tiny, two_roots, tmp_path):
    command = cache_overrides(tiny, two_roots / "mine", tmp_path / "cache")[1:]
    assert "encoded 14 samples" in run_task("cache", *command, "data.resolution=[64,96]")
    assert "encoded" not in run_task("cache", *command, "data.resolution=96").partition("done: ")[0]
    text = run_task("cache", *command, "data.resolution=96", "data.trigger_word=sks")
    assert "encoded 7 samples" in text, "the captions are others"
    captions = [row["captions"] for row in only(tmp_path / "cache").rows() if "key" in row]
    assert ["sks, invert it", "sks, negative, please", "sks, make a negative of this picture"] in captions


@pytest.mark.slow
def test_weight_of_a_root_scales_its_losses(run, tiny, two_roots, tmp_path):
    losses = []
    for name, weight in (("one", 1), ("half", 0.5)):
        root = f"[{{path: {two_roots}/others, weight: {weight}}}]"
        run("train", *short(tiny, root, tmp_path / name, 1), "data.resolution=64")
        losses.append(float(metrics(tmp_path / name)[0]["loss"]))
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-4)
