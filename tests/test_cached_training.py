"""Training on a cache, and on shards alone."""

import shutil

import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from datamodules.pairs import PairDataset, collate_pixels
from datamodules.shards.reader import EncodedSample, Place
from datamodules.split import Split
from tasks.encode import build_cache
from tests.support.caches import short
from tests.support.commands import compose
from tests.support.objectives import losses
from tests.support.pictures import make_pairs, photograph
from tests.support.same_runs import assert_close


@pytest.mark.parametrize(("vae_encode_mode", "caption_dropout_rate"), [("sample", 0.5), ("mode", 0.0)])
def test_cached_and_streamed_training_give_the_same_loss(run, tiny, tmp_path, vae_encode_mode, caption_dropout_rate):
    """Same samples, noise and timesteps: with dropout, several controls, masks and prompts of mixed lengths."""
    mixed = make_pairs(tmp_path / "mixed", [(32, 32)] * 4 + [(48, 32)] * 4)
    for number in range(4, 8):
        photograph("coffee", 64, 32).save(mixed / "control_images" / f"{number:02d}_control_1.png")
        photograph("chelsea", 48, 32).save(mixed / "control_images" / f"{number:02d}_mask.png")
    (mixed / "training_images" / "01.txt").write_text("snow " * 10)
    (mixed / "training_images" / "02.txt").write_text("")
    overrides = [*short(tiny, mixed, tmp_path / "run", 2), f"model.vae_encode_mode={vae_encode_mode}"]
    overrides.append(f"data.caption_dropout_rate={caption_dropout_rate}")
    cfg = compose("train", *overrides)
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    build_cache(cfg, data)
    data.open(data.cache(module))
    module.configure_model()
    read = data.reader(False, data.choices)
    raw = PairDataset(data.training.views, data.sample_set.condition_images, data.choices)
    taken, dropped = [], []
    for first in (0, 4):
        items = [(number, 100 + number) for number in range(first, first + 4)]
        batch, pixels = read(items), collate_pixels([raw[item] for item in items])
        assert (batch.prompts, batch.dropped) == (pixels.prompts, pixels.dropped)
        with torch.no_grad():
            cached, streamed = losses(module, batch), losses(module, module.encoder(pixels))
        torch.testing.assert_close(cached, streamed, rtol=1e-6, atol=1e-6)
        taken += cached.tolist()
        dropped += batch.dropped
    assert len(set(taken)) == 8
    assert dropped == [data.choices.caption(100 + number, 1) is None for number in range(8)]
    assert any(dropped) == (caption_dropout_rate > 0)


def test_token_budget_makes_large_images_small_batches():
    data = instantiate(compose("train", "data.root=unread", "data.max_tokens_per_batch=300").data)
    place = Place("latents-00000-000000.tar", 0, 0, 0, 0)
    large, small = ((((side, side),), ()) for side in (64, 32))
    data.training = Split(
        encoded=[
            EncodedSample("", size, tokens, True, place, [place], place)
            for size, tokens in ((large, 90), (small, 72), (large, 96), (small, 70))
        ]
    )
    assert data.batch_limits() == {large: 3, small: 4}
    data.max_tokens_per_batch = 80
    assert data.batch_limits() == {large: 1, small: 1}


@pytest.mark.slow
def test_run_trains_on_shards_without_images(run, gallery, tiny, pairs, tmp_path):
    """A copy or URL of a cache needs no images, and yields the same weights; sample images come from the latents."""
    cfg = compose("train", *short(tiny, pairs, tmp_path / "run", 2))
    copy = shutil.copytree(build_cache(cfg, instantiate(cfg.data)).folder, tmp_path / "copy")
    arguments = [*short(tiny, "null", tmp_path / "run", 2, shown=True), f"data.shards={copy.as_uri()}"]
    quick = ["model.sampling.num_inference_steps=1", "sample_every=0", "data.num_workers=2"]
    text = run("train", *arguments, *quick).text
    assert f"8 pairs of {copy.as_uri()}" in text
    assert "loading text_encoder" not in text
    assert_close(tmp_path / "run", gallery("plain").folder, rtol=0, atol=0)
    pictures = list((tmp_path / "run" / "samples" / "step-000002").glob("*.png"))
    assert len(pictures) == 4
    assert Image.open(pictures[0]).size == (96, 32)
    other = [*short(tiny, "null", tmp_path / "other", 2), "model.max_sequence_length=32", f"data.shards={copy}"]
    error = run("train", *other, ok=False).error
    assert "does not match this run: it was encoded with settings max_sequence_length: 16 (here" in error


def test_a_cache_below_a_file_is_refused(refuses, tmp_path):
    (tmp_path / "file").write_text("")
    refuses(f"data.cache_dir={tmp_path / 'file'}/cache", words="Not a directory")
