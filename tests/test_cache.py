"""The content of a cache, encoding again after changes, and the tasks on caches."""

import os
import shlex
import shutil
import time

import pytest
import safetensors.torch
from hydra.utils import instantiate
from PIL import Image

from cli.arguments import quote_values
from datamodules.shards.cache import Cache
from tests.support.caches import cache_overrides, encoded, only, short
from tests.support.commands import compose, run_task
from tests.support.pictures import make_pairs, photograph


def test_only_what_has_changed_is_encoded_again_and_the_command_that_trains_on_it_is_shown(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "my pairs, [old]", [(32, 32)] * 5)
    command = cache_overrides(tiny, root, tmp_path / "a cache")
    first = run("predict", *command)
    assert encoded(first) == 5
    [shown] = [line.partition("train on it: ")[2] for line in first.text.splitlines() if "train on it: " in line]
    python, script, *arguments = shlex.split(shown)
    assert (python, script) == ("python", "train.py")
    data = compose("train", *quote_values(arguments)).data
    assert (data.root, data.cache_dir) == (str(root), str(tmp_path / "a cache"))

    photograph("camera", 32, 32).save(root / "control_images" / "01.png")
    (root / "training_images" / "02.txt").write_text("another instruction")
    photograph("camera", 32, 32).save(root / "control_images" / "03_mask.png")
    for folder in ("training_images", "control_images"):
        photograph("moon", 32, 32).save(root / folder / "new.png")
        (root / folder / "00.png").unlink()
    (root / "training_images" / "new.txt").write_text("new")
    assert encoded(run("predict", *command)) == 4
    assert len(only(tmp_path / "a cache").sample_ids()) == 5 + 4

    for path in root.rglob("*.png"):  # touched and renamed, with the same content
        os.utime(path)
        path.rename(path.with_name(f"x{path.name}"))
    for path in root.rglob("*.txt"):
        path.rename(path.with_name(f"x{path.name}"))
    (root / "training_images" / "x00.txt").unlink()
    again = run("predict", *command)
    assert encoded(again) == 0
    assert "loading text_encoder" not in again.text


def test_other_settings_and_weights_are_another_cache(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")

    def name(*overrides):
        cfg = compose("predict", *cache_overrides(model, tmp_path, tmp_path / "cache"), *overrides)
        return instantiate(cfg.data).cache(instantiate(cfg.model)).folder.name

    others = ["model.max_sequence_length=32", "model.vae_encode_mode=mode", "model.dtype=bfloat16"]
    assert len({name(), *map(name, others)}) == 4
    before, weights = name(), model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes())
    (model / "transformer" / "note.txt").write_text("the transformer has no part in it")
    assert name() == before
    vae = model / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load(vae.read_bytes())
    tensors["encoder.conv_in.bias"] = tensors["encoder.conv_in.bias"] + 1
    safetensors.torch.save_file(tensors, vae, metadata={"format": "pt"})
    assert name() != before


def test_preview_shows_the_samples_without_a_model(tmp_path):
    root = make_pairs(tmp_path / "pairs", [(40, 32), (48, 32)])
    (root / "training_images" / "00.txt").write_text("a $5 caption of [trigger], süß")
    where = [f"data.root={root}", f"output_dir={tmp_path / 'out'}"]
    text = run_task("preview", *where, "model.pretrained_model_name_or_path=/nowhere")
    assert "note: 1 pair has [trigger] in the captions" in text
    assert Image.open(tmp_path / "out" / "preview.png").width > 500


@pytest.mark.slow
def test_name_of_any_bytes_is_cached_trained_on_held_out_and_shown(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    for path in list(root.rglob("0[01].*")):
        path.rename(path.with_name(os.fsdecode(b"caf\xe9" + path.name.encode())))
    samples = ["model.sampling.num_inference_steps=1", "sample_every=0", "data.val_count=1"]
    arguments = short(tiny, root, tmp_path / "run", 1, shown=True)
    run("train", *arguments, *samples)
    assert (tmp_path / "run" / "report.html").is_file()
    assert (only(tmp_path / "cache").folder / "preview.png").is_file()
    (root / "control_images" / "02.png").rename(root / "control_images" / f"{'ä' * 120}.png")
    edit = [f"lora={tmp_path / 'run'}", f"image={root}/control_images", "prompt=x", "num_inference_steps=1"]
    run("predict", *edit, f"output_dir={tmp_path / 'out'}")
    assert len(list((tmp_path / "out").glob("*.png"))) == 3


def test_old_caches_are_deleted_on_request_except_recent_ones_and_the_last_used_one(tiny, tmp_path):
    """A command with other settings, such as those of the demo, does not delete the cache that was used last."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)])
    settings = cache_overrides(tiny, root, tmp_path / "cache")[1:]
    cfg = compose("predict", "task=clean", *settings)
    demo = instantiate(cfg.data).cache(instantiate(cfg.model))
    caches = [demo, *(Cache(demo.folder.with_name(letter * 16), {"family": "FluxKontext"}) for letter in "abc")]
    for number, cache in enumerate(caches):
        assert cache.touch()
        cache.merge()
        used = 1000 + number if number < 2 else time.time() - 3600 * number
        os.utime(cache.folder / ".used", (used, used))
    assert "delete=true frees" in run_task("clean", *settings)
    text = run_task("clean", *settings, "delete=true")
    assert f"{caches[1]}  " in text
    assert "0 samples of FluxKontext" in text
    assert ", last used 1970-" in text
    assert f"{caches[3]}, 0 samples of FluxKontext (a local model, None), last used 2" in text
    assert [cache.folder.exists() for cache in caches] == [True, False, True, True], "one is of the last day"
    assert "nothing to free" in run_task("clean", *settings, "delete=true")
