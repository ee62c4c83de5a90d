"""Training on a cache, and on shards alone."""

import shutil

import pytest
import torch
from hydra.utils import instantiate
from PIL import Image

from datamodules.pairs import collate_pixels
from datamodules.shards.reader import EncodedSample, Place
from tasks.encode import build_cache
from tests.support.caches import only, short
from tests.support.commands import compose, kill_when, lora_bytes
from tests.support.objectives import losses
from tests.support.pictures import make_pairs


@pytest.mark.parametrize(("vae_encode_mode", "caption_dropout_rate"), [("sample", 0.5), ("mode", 0.0)])
def test_cached_and_streamed_training_give_the_same_loss(
    run, tiny, mixed, tmp_path, vae_encode_mode, caption_dropout_rate
):
    """Same samples, noise and timesteps: with dropout, several controls, masks and prompts of mixed lengths."""
    overrides = [*short(tiny, mixed, tmp_path / "run", 2), f"model.vae_encode_mode={vae_encode_mode}"]
    overrides.append(f"data.caption_dropout_rate={caption_dropout_rate}")
    cfg = compose("train", *overrides)
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    build_cache(cfg, data)
    data.open(data.cache(module))
    module.configure_model()
    module.flow.caption_dropout_rate = caption_dropout_rate
    read = data.reader(caption_dropout_rate > 0)
    raw = data.pixels(8)
    taken = []
    for first in (0, 4):
        numbers = range(first, first + 4)
        batch = read([(number, 100 + number) for number in numbers])
        pixels = [raw[number] for number in numbers]
        for number, sample in zip(numbers, pixels, strict=True):
            sample.draws = [100 + number]
        with torch.no_grad():
            cached = losses(module, batch)
            streamed = losses(module, module.encoder(collate_pixels(pixels), ""))
        torch.testing.assert_close(cached, streamed, rtol=1e-6, atol=1e-6)
        taken += cached.tolist()
    assert len(set(taken)) == 8


@pytest.mark.slow
def test_resumed_run_on_cached_data_is_bitwise_the_uninterrupted_one_after_kill_9(run, start, tiny, tmp_path):
    """In the middle of an epoch, in mixed sizes under a token budget, with two data workers and caption dropout."""
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32), (64, 64), (32, 48)] * 4)
    settings = ["data.max_tokens_per_batch=250", "data.num_workers=2", "save_every=12", "scheduler=constant"]
    settings += ["data.caption_dropout_rate=0.3"]
    run("train", *short(tiny, root, tmp_path / "whole", 24), *settings)
    killed = [*short(tiny, root, tmp_path / "killed", 24), *settings]
    process = start("train", *killed, "+callbacks.hold={_target_: tests.support.hold.Hold, step: 15}")
    kill_when((tmp_path / "killed" / "checkpoints" / "last.ckpt").exists, process)
    assert not (tmp_path / "killed" / "lora" / "step-000024").exists()
    run("train", *killed, "ckpt_path=last")
    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "whole")
    assert lora_bytes(tmp_path / "whole", "step-000012") != lora_bytes(tmp_path / "whole")


def test_token_budget_makes_large_images_small_batches():
    data = instantiate(compose("train", "data.root=unread", "data.max_tokens_per_batch=300").data)
    place = Place("latents-00000-000000.tar", 0, 0, 0, 0)
    large, small = ((((side, side),), ()) for side in (64, 32))
    data.use_encoded(
        [
            EncodedSample("", size, tokens, True, place, [place], place)
            for size, tokens in ((large, 90), (small, 72), (large, 96), (small, 70))
        ]
    )
    assert data.batch_limits() == {large: 3, small: 4}
    data.max_tokens_per_batch = 80
    assert data.batch_limits() == {large: 1, small: 1}


def test_run_trains_on_shards_alone(run, tiny, pairs, tmp_path):
    """A copy or URL of a cache needs no images, and yields the same weights; sample images come from the latents."""
    steps = "model.sampling.num_inference_steps=1"
    run("train", *short(tiny, pairs, tmp_path / "first", 2), steps)
    copy = shutil.copytree(only(tmp_path / "cache").folder, tmp_path / "copy")
    arguments = [*short(tiny, "null", tmp_path / "second", 2, shown=True), steps, f"data.shards={copy}"]
    text = run("train", *arguments, "sample_every=0").text
    assert f"8 pairs of {copy}" in text
    assert "loading text_encoder" not in text
    assert lora_bytes(tmp_path / "first") == lora_bytes(tmp_path / "second")
    pictures = list((tmp_path / "second" / "samples" / "step-000002").glob("*.png"))
    assert len(pictures) == 4
    assert Image.open(pictures[0]).size == (96, 32)
    streamed = [*short(tiny, "null", tmp_path / "streamed", 2), steps, f"data.shards={copy.as_uri()}"]
    run("train", *streamed, "data.num_workers=2")
    assert lora_bytes(tmp_path / "first") == lora_bytes(tmp_path / "streamed")
    other = [*short(tiny, "null", tmp_path / "other", 2), "model.max_sequence_length=32", f"data.shards={copy}"]
    error = run("train", *other, ok=False).error
    assert "does not match this run: it was encoded with settings max_sequence_length: 16 (here" in error


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.shards=/nowhere", "/nowhere: there is no such folder or protocol"),
        ("data.shards={empty}", "it contains no manifest.json"),
        ("data.cache_dir={file}/cache", "Not a directory"),
    ],
)
def test_impossible_setting(refuses, tmp_path, override, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    override = override.format(empty=tmp_path / "empty", file=tmp_path / "file")
    refuses(override, *(["data.root=null"] if "shards" in override else []), words=words)
