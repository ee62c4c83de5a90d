"""What a cache holds, what is encoded again, and the tasks on it."""

import os
import shlex
import shutil

import pytest
import safetensors.torch
from PIL import Image

from tasks.arguments import quote_values
from tests.support.caches import cache_overrides, encoded, only, short
from tests.support.combinations import first
from tests.support.commands import compose, lora_bytes
from tests.support.pictures import make_pairs, photograph


def test_second_run_encodes_nothing(run, tiny, pairs, tmp_path):
    assert encoded(run("train", *short(tiny, pairs, tmp_path / "first", 1))) == 8
    second = run("train", *short(tiny, pairs, tmp_path / "second", 1))
    assert encoded(second) == 0
    assert "loading text_encoder" not in second.text
    assert lora_bytes(tmp_path / "first") == lora_bytes(tmp_path / "second")


def test_only_what_has_changed_is_encoded_again(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 5)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert encoded(run("predict", *command)) == 5
    cache = only(tmp_path / "cache")
    ids = cache.sample_ids()

    photograph("camera", 32, 32).save(root / "control_images" / "01.png")
    assert encoded(run("predict", *command)) == 1
    (root / "training_images" / "02.txt").write_text("another instruction")
    assert encoded(run("predict", *command)) == 1
    photograph("camera", 32, 32).save(root / "control_images" / "03_mask.png")
    assert encoded(run("predict", *command)) == 1
    for folder in ("training_images", "control_images"):
        photograph("moon", 32, 32).save(root / folder / "new.png")
        (root / folder / "00.png").unlink()
    (root / "training_images" / "new.txt").write_text("new")
    assert encoded(run("predict", *command)) == 1
    assert len(only(tmp_path / "cache").sample_ids()) == len(ids) + 4

    for path in root.rglob("*.png"):  # touched and renamed, with the same content
        os.utime(path)
        path.rename(path.with_name(f"x{path.name}"))
    for path in root.rglob("*.txt"):
        path.rename(path.with_name(f"x{path.name}"))
    (root / "training_images" / "x00.txt").unlink()
    assert encoded(run("predict", *command)) == 0


@pytest.mark.parametrize(
    "override", first(1, ["model.max_sequence_length=32", "model.vae_encode_mode=mode", "model.dtype=bfloat16"])
)
def test_other_settings_are_another_cache(run, tiny, tmp_path, override):
    command = cache_overrides(tiny, make_pairs(tmp_path / "pairs", [(32, 32)]), tmp_path / "cache")
    run("predict", *command)
    assert encoded(run("predict", *command, override)) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_other_weights_are_another_cache(run, tiny, tmp_path):
    own = shutil.copytree(tiny, tmp_path / "model")
    command = cache_overrides(own, make_pairs(tmp_path / "pairs", [(32, 32)]), tmp_path / "cache")
    run("predict", *command)
    weights = own / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes())
    (own / "transformer" / "note.txt").write_text("the transformer has no part in it")
    assert encoded(run("predict", *command)) == 0
    vae = own / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load(vae.read_bytes())
    tensors["encoder.conv_in.bias"] = tensors["encoder.conv_in.bias"] + 1
    safetensors.torch.save_file(tensors, vae, metadata={"format": "pt"})
    assert encoded(run("predict", *command)) == 1


def test_preview_shows_the_samples_without_a_model(run, pairs, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(40, 32), (48, 32)])
    (root / "training_images" / "00.txt").write_text("a $5 caption of [trigger], süß")
    arguments = ["task=preview", f"data.root={root}", f"output_dir={tmp_path / 'out'}"]
    outcome = run("predict", *arguments, "model.pretrained_model_name_or_path=/nowhere")
    assert "note: 1 pair has [trigger] in the captions" in outcome.text
    assert Image.open(tmp_path / "out" / "preview.png").width > 500
    assert "no such folder" in run("predict", "task=preview", "data.root=/nowhere", ok=False).error


def test_samples_are_held_out_in_each_task(run, tiny, pairs, tmp_path):
    """And task=dry_run: tests/tasks/test_dry_run.py."""
    settings = [*cache_overrides(tiny, pairs, tmp_path / "cache")[1:], "data.val_count=3"]
    run("predict", "task=preview", *settings, f"output_dir={tmp_path / 'shown'}")
    assert (tmp_path / "shown" / "preview.png").is_file()
    assert encoded(run("predict", "task=cache", *settings)) == 8
    nothing = run("train", *short(tiny, pairs, tmp_path / "run", 1), "data.val_count=8", ok=False).error
    assert "data.val_count=8 of 8 pairs leaves none to train on: at most data.val_count=7" in nothing


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


def test_caches_are_named_and_old_ones_deleted_when_told_but_the_last_used_stays(run, tiny, tmp_path):
    """Another command's settings, as those of the demo, do not delete the cache that was used last; older ones go."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 2)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    folders = {}
    for number, (name, length) in enumerate({"demo": 16, "old": 24, "mine": 32}.items()):
        known = {path.parent for path in tmp_path.glob("cache/*/.used")}
        run("predict", *command, f"model.max_sequence_length={length}")
        [folders[name]] = {path.parent for path in tmp_path.glob("cache/*/.used")} - known
        os.utime(folders[name] / ".used", (1000 + number, 1000 + number))
    clean = ["task=clean", *command[1:], "model.max_sequence_length=16"]
    text = run("predict", *clean).text
    assert "2 samples of FluxKontext" in text
    assert "delete=true frees" in text
    assert all(folder.exists() for folder in folders.values())
    text = run("predict", *clean, "delete=true").text
    [line] = [line for line in text.splitlines() if line.startswith(f"{folders['mine']}, ")]
    assert ", was used last: it stays" in line
    assert f"{folders['old']}  " in text
    assert ", last used 1970-" in text
    assert "freed" in text
    assert [name for name in folders if folders[name].exists()] == ["demo", "mine"]
    assert "nothing to free" in run("predict", *clean, "delete=true").text


def test_task_that_does_not_exist(run):
    assert "task=catch: there is no such task. Did you mean cache?" in run("predict", "task=catch", ok=False).error


def test_command_that_trains_on_a_cache_is_quoted(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "my pairs, [old]", [(32, 32)] * 2)
    text = run("predict", *cache_overrides(tiny, root, tmp_path / "a cache")).text
    [command] = [line.partition("train on it: ")[2] for line in text.splitlines() if "train on it: " in line]
    python, script, *arguments = shlex.split(command)
    assert (python, script) == ("python", "train.py")
    data = compose("train", *quote_values(arguments)).data
    assert (data.root, data.cache_dir) == (str(root), str(tmp_path / "a cache"))
