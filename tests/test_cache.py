"""The promises of a cache, by the real command lines."""

import os
import re
import shlex
import shutil
import signal

import pytest
import safetensors.torch
import torch
from hydra.utils import instantiate
from PIL import Image

import train
from datamodules.images.dataset import collate as collate_pixels
from datamodules.shards.cache import Cache
from datamodules.shards.tar import scan
from tasks.terminal import quote_values
from tests.conftest import compose, lora_bytes, make_pairs, photograph, short, start, wait_until
from tests.datamodules.test_shards import content
from tests.datamodules.test_transforms import unreadable


def cache_overrides(tiny, root, folder):
    return [
        "task=cache",
        f"model.pretrained_model_name_or_path={tiny}",
        f"data.root={root}",
        f"data.cache_dir={folder}",
        "data.num_workers=0",
        "trainer.accelerator=cpu",
        f"output_dir={folder.parent / 'unused'}",
    ]


def only(folder) -> Cache:
    """The one cache in a cache_dir."""
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return Cache(found, {})


def encoded(outcome) -> int:
    """How many samples a command says it has encoded."""
    match = re.search(r"encoded (\d+) samples", outcome.text)
    return int(match[1]) if match else 0


@pytest.fixture
def mixed(tmp_path):
    """Two sizes, one with a second control of a size of its own, masks, prompts of very different lengths."""
    root = make_pairs(tmp_path / "mixed", [(32, 32)] * 4 + [(48, 32)] * 4)
    for number in range(4, 8):
        photograph("coffee", 64, 32).save(root / "control_images" / f"{number:02d}_control_1.png")
        photograph("chelsea", 48, 32).save(root / "control_images" / f"{number:02d}_mask.png")
    (root / "training_images" / "01.txt").write_text("snow " * 10)
    (root / "training_images" / "02.txt").write_text("")
    return root


@pytest.mark.parametrize("vae_encode_mode", ["sample", "mode"])
@pytest.mark.parametrize("caption_dropout_rate", [0.0, 0.5])
def test_cached_and_streamed_training_give_the_same_loss(
    run, tiny, mixed, tmp_path, vae_encode_mode, caption_dropout_rate
):
    """Same samples, noise and timesteps: with dropout, several controls, masks and prompts of mixed lengths."""
    overrides = [*short(tiny, mixed, tmp_path / "run", 2), f"model.vae_encode_mode={vae_encode_mode}"]
    overrides.append(f"data.caption_dropout_rate={caption_dropout_rate}")
    cfg = compose("train", *overrides)
    module, data = instantiate(cfg.model), instantiate(cfg.data)
    train.build_cache(cfg, data)
    data.open(data.cache(module))
    module.configure_model()
    module.caption_dropout_rate = caption_dropout_rate
    read = data.reader(caption_dropout_rate > 0)
    raw = data.pixels(8)
    losses = []
    for first in (0, 4):
        numbers = range(first, first + 4)
        batch = read([(number, 100 + number) for number in numbers])
        pixels = [raw[number] for number in numbers]
        for number, sample in zip(numbers, pixels, strict=True):
            sample.draws = [100 + number]
        with torch.no_grad():
            cached = module.losses(batch)
            streamed = module.losses(module.encode(collate_pixels(pixels), ""))
        torch.testing.assert_close(cached, streamed, rtol=1e-6, atol=1e-6)
        losses += cached.tolist()
    assert len(set(losses)) == 8


def test_cached_training_imports_and_loads_no_encoder(run, tiny, pairs, tmp_path):
    arguments = short(tiny, pairs, tmp_path / "run", 3)
    run("predict", *cache_overrides(tiny, pairs, tmp_path / "cache"))
    probe = "+callbacks.probe={_target_: tests.loaded_modules.LoadedModules, file: " + f"{tmp_path}/modules" + "}"
    process = start("train", *arguments, probe)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    assert "loading transformer" in text
    assert "loading text_encoder" not in text
    assert "loading vae" not in text
    modules = (tmp_path / "modules").read_text().splitlines()
    encoders = ("modeling_t5", "modeling_clip", "autoencoder_kl", "pipeline_flux_kontext")
    assert not [name for name in modules if name.endswith(encoders)]


def test_second_run_encodes_nothing(run, tiny, pairs, tmp_path):
    first = run("train", *short(tiny, pairs, tmp_path / "first", 1))
    assert encoded(first) == 8
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
    text = run("train", *short(tiny, root, tmp_path / "run", 1)).text
    assert "5 pairs of" in text
    assert encoded(run("train", *short(tiny, root, tmp_path / "again", 1))) == 0


@pytest.mark.parametrize(
    "override", ["model.max_sequence_length=32", "model.vae_encode_mode=mode", "model.dtype=bfloat16"]
)
def test_other_settings_are_another_cache(run, tiny, pairs, tmp_path, override):
    command = cache_overrides(tiny, pairs, tmp_path / "cache")
    run("predict", *command)
    assert encoded(run("predict", *command, override)) == 8
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_other_weights_are_another_cache(run, tiny, pairs, tmp_path):
    own = tmp_path / "model"
    shutil.copytree(tiny, own)
    command = cache_overrides(own, pairs, tmp_path / "cache")
    run("predict", *command)
    weights = own / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes())
    (own / "transformer" / "note.txt").write_text("the transformer has no part in it")
    assert encoded(run("predict", *command)) == 0
    vae = own / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load(vae.read_bytes())
    tensors["encoder.conv_in.bias"] = tensors["encoder.conv_in.bias"] + 1
    safetensors.torch.save_file(tensors, vae, metadata={"format": "pt"})
    assert encoded(run("predict", *command)) == 8


def test_build_killed_9_goes_on_and_encodes_no_finished_sample_again(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32)] * 60)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"), "data.shard_size=300000")
    command = [*cache_overrides(tiny, root, tmp_path / "killed"), "data.shard_size=300000"]
    process = start("predict", *command)
    wait_until(lambda: len(list((tmp_path / "killed").glob("*/*.tar"))) > 1, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (folder,) = (path for path in (tmp_path / "killed").iterdir() if path.is_dir())
    done = sum("key" in row for tar in folder.glob("*.tar") for row in scan(tar)[0])
    assert 0 < done < 120

    assert done + encoded(run("predict", *command)) == 120
    killed, whole = only(tmp_path / "killed"), only(tmp_path / "whole")
    index = [sorted((cache.folder / "index.jsonl").read_text().splitlines()) for cache in (killed, whole)]
    assert index[0] == index[1]
    assert content(killed) == content(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_build_that_is_told_to_stop_says_so_and_goes_on(run, tiny, tmp_path, number):
    """The whole process group is told, data workers included."""
    root = make_pairs(tmp_path / "pairs", [(64, 64)] * 100)
    command = [*cache_overrides(tiny, root, tmp_path / "cache"), "data.num_workers=1"]
    process = start("predict", *command)
    wait_until(lambda: any(tar.stat().st_size > 10**5 for tar in (tmp_path / "cache").glob("*/*.tar")), process)
    os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, text
    assert f"stopped by {number.name}; the same command goes on" in text
    assert "Traceback" not in text
    assert 0 < encoded(run("predict", *command)) < 100


def test_two_processes_build_the_cache_that_one_builds(run, tiny, mixed, tmp_path):
    run("predict", *cache_overrides(tiny, mixed, tmp_path / "one"))
    two = [*cache_overrides(tiny, mixed, tmp_path / "two"), "trainer.devices=2", "trainer.strategy=ddp"]
    process = start("predict", *two)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert content(only(tmp_path / "one")) == content(only(tmp_path / "two"))
    shards = only(tmp_path / "two").manifest()["shards"]
    assert {name: facts["samples"] for name, facts in shards.items()} == {
        "latents-00000-000000.tar": 4,
        "latents-00001-000000.tar": 4,
    }


def test_two_processes_train_on_a_cache_that_they_build_first(run, tiny, tmp_path):
    """Of which one sample is lacking: one of the processes has nothing to do."""
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 8)
    run("predict", *cache_overrides(tiny, root, tmp_path / "cache"))
    (root / "training_images" / "03.txt").write_text("another instruction")
    two = [*short(tiny, root, tmp_path / "two", 4), "trainer.devices=2", "trainer.strategy=ddp"]
    process = start("train", *two)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    assert "encoded 1 samples" in text
    run("train", *short(tiny, root, tmp_path / "one", 4), "data.batch_size=2")
    one, other = (safetensors.torch.load(lora_bytes(tmp_path / name)) for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-5)


def test_resumed_run_on_cached_data_is_bitwise_the_uninterrupted_one_after_kill_9(run, tiny, tmp_path):
    """In the middle of an epoch, in mixed sizes under a token budget, with two data workers and caption dropout."""
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32), (64, 64), (32, 48)] * 4)
    settings = ["data.max_tokens_per_batch=250", "data.num_workers=2", "save_every=12", "scheduler=constant"]
    settings += ["data.caption_dropout_rate=0.3"]
    run("train", *short(tiny, root, tmp_path / "whole", 24), *settings)
    killed = [*short(tiny, root, tmp_path / "killed", 24), *settings]
    process = start("train", *killed)
    wait_until((tmp_path / "killed" / "checkpoints" / "last.ckpt").exists, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "lora" / "step-000024").exists()
    run("train", *killed, "ckpt_path=last")
    assert lora_bytes(tmp_path / "killed") == lora_bytes(tmp_path / "whole")
    assert lora_bytes(tmp_path / "whole", "step-000012") != lora_bytes(tmp_path / "whole")


def test_token_budget_makes_large_pictures_small_batches(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 8 + [(64, 64)] * 4)
    cfg = compose(
        "train",
        *short(tiny, root, tmp_path / "run", 1),
        "model.max_sequence_length=64",
        "data.max_tokens_per_batch=300",
    )
    data, module = instantiate(cfg.data), instantiate(cfg.model)
    train.build_cache(cfg, data)
    data.open(data.cache(module))
    # 64 tokens of text, and 4 or 16 for each of two pictures.
    assert sorted(data.batch_limits().values()) == [3, 4]
    data.max_tokens_per_batch = 80
    data.open(data.cache(module))
    assert sorted(data.batch_limits().values()) == [1, 1]
    assert data.notes == ["4 samples alone have more tokens than data.max_tokens_per_batch=80"]


def test_damaged_shard_is_named_and_only_its_samples_are_encoded_again(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 12)
    command = [*cache_overrides(tiny, root, tmp_path / "cache"), "data.shard_size=60000"]
    run("predict", *command)
    cache = only(tmp_path / "cache")
    before = content(cache)
    name, facts = next(iter(cache.manifest()["shards"].items()))
    path = cache.folder / name
    path.write_bytes(path.read_bytes()[:-9000])
    outcome = run("predict", *command)
    assert f"{name} is damaged or gone: what it lacks of its {facts['samples']} samples is" in outcome.text
    assert 0 < encoded(outcome) <= facts["samples"] < 12
    assert content(only(tmp_path / "cache")) == before


def test_run_trains_on_shards_alone(run, tiny, pairs, tmp_path):
    """A folder of shards needs no pictures, and gives the same weights; sample pictures come from the latents."""
    run("train", *short(tiny, pairs, tmp_path / "first", 4))
    shutil.copytree(only(tmp_path / "cache").folder, tmp_path / "copy")
    arguments = [a for a in short(tiny, "null", tmp_path / "second", 4) if "sample_images" not in a]
    samples = ["sample_every=0", "callbacks.sample_images.num_inference_steps=1"]
    text = run("train", *arguments, f"data.shards={tmp_path / 'copy'}", *samples).text
    assert f"8 samples of {tmp_path / 'copy'}" in text
    assert lora_bytes(tmp_path / "first") == lora_bytes(tmp_path / "second")
    pictures = list((tmp_path / "second" / "samples" / "step-000004").glob("*.png"))
    assert len(pictures) == 4
    assert Image.open(pictures[0]).size == (96, 32)


def test_run_streams_from_a_pipe(run, tiny, pairs, tmp_path):
    run("predict", *cache_overrides(tiny, pairs, tmp_path / "cache"))
    url = f"pipe:cat {only(tmp_path / 'cache').folder}/latents-00000-000000.tar"
    arguments = [*short(tiny, "null", tmp_path / "run", 6), "data.batch_size=2", "data.num_workers=2"]
    text = run("train", *arguments, f"data.shards={url}").text
    assert "8 samples in 1 shards, streamed from pipe:cat" in text
    assert "loading text_encoder" not in text
    run("train", *arguments, f"data.shards={url}", "ckpt_path=last", "trainer.max_steps=9")


def test_shards_of_other_settings_are_refused(run, tiny, pairs, tmp_path):
    run("predict", *cache_overrides(tiny, pairs, tmp_path / "cache"))
    folder = only(tmp_path / "cache").folder
    arguments = [*short(tiny, "null", tmp_path / "run", 2), "model.max_sequence_length=32"]
    for url in (folder, f"pipe:cat {folder}/latents-00000-000000.tar"):
        error = run("train", *arguments, f"data.shards={url}", ok=False).error
        assert "does not fit this run: it was encoded with settings max_sequence_length: 16 (here" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.shards=/nowhere", "/nowhere/manifest.json is not there"),
        ("data.shards={empty}", "no manifest.json"),
        ("data.max_tokens_per_batch=0", "data.max_tokens_per_batch=0: must be a whole number from 1 on"),
        ("data.shard_size=big", "data.shard_size=big: must be a whole number from 1 on"),
        ("data.cache_dir={file}/cache", "Not a directory"),
        ("data.shards=http://127.0.0.1:9/x.tgz", "data.shards: http://127.0.0.1:9/x.tgz/manifest.json cannot be read"),
        ("data.num_workers=-1", "data.num_workers=-1: must be a whole number from 0 on"),
    ],
)
def test_impossible_setting(run, tiny, pairs, tmp_path, override, words, monkeypatch):
    monkeypatch.setattr("datamodules.shards.transfer.PAUSE", 0.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    override = override.format(empty=tmp_path / "empty", file=tmp_path / "file")
    root = "null" if override.startswith("data.shards=") else pairs
    arguments = [*short(tiny, root, tmp_path / "run", 2), override]
    assert words in run("train", *arguments, ok=False).error
    assert not (tmp_path / "run").exists()


def test_mistakes_elsewhere_are_found_before_anything_is_encoded(run, tiny, pairs, tmp_path):
    run("train", *short(tiny, pairs, tmp_path / "run", 2), "adapter.target_modules=[to_kk]", ok=False)
    assert not list((tmp_path / "cache").glob("*/*.tar"))


def test_bad_image_stops_the_build_or_is_left_out(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    (root / "control_images" / "01.png").write_text("no picture")
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert "01.png" in run("predict", *command, ok=False).error
    assert encoded(run("predict", *command, "data.on_bad_image=skip")) == 2
    text = run("train", *short(tiny, root, tmp_path / "run", 1), "data.on_bad_image=skip").text
    assert "2 pairs of" in text
    assert "skipped 1 unusable" in text
    assert encoded(run("predict", *command, "data.on_bad_image=skip")) == 0


def test_picture_that_changes_while_it_is_encoded_is_refused(run, tiny, pairs, tmp_path, monkeypatch):
    """Else new pixels would go by the name of the old ones, for ever."""
    from datamodules import encoding

    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    load = encoding.PairDataset.__getitem__

    def change_first(self, item):
        if item[0] == 1:
            photograph("camera", 32, 32).save(root / "control_images" / "01.png")
        return load(self, item)

    monkeypatch.setattr(encoding.PairDataset, "__getitem__", change_first)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert "changed while it was encoded: start again" in run("predict", *command, ok=False).error
    monkeypatch.undo()
    assert encoded(run("predict", *command)) == 2


def test_no_usable_pair(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)])
    (root / "control_images" / "00.png").write_text("no picture")
    command = [*cache_overrides(tiny, root, tmp_path / "cache"), "data.on_bad_image=skip"]
    assert "no usable pair is left" in run("predict", *command, ok=False).error
    arguments = [*short(tiny, root, tmp_path / "run", 1), "data.on_bad_image=skip"]
    assert "no usable pair is left" in run("train", *arguments, ok=False).error


def test_copied_shards_that_are_not_whole_are_refused_at_once(run, tiny, pairs, tmp_path):
    run("predict", *cache_overrides(tiny, pairs, tmp_path / "cache"))
    tar = next(only(tmp_path / "cache").folder.glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-1])
    arguments = [*short(tiny, "null", tmp_path / "run", 1), f"data.shards={tar.parent}"]
    assert "latents-00000-000000.tar is not whole: copy it again" in run("train", *arguments, ok=False).error


def test_preview_shows_the_samples_without_a_model(run, pairs, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(40, 32), (48, 32)])
    (root / "training_images" / "00.txt").write_text("a $5 caption, süß")
    arguments = ["task=preview", f"data.root={root}", f"output_dir={tmp_path / 'out'}"]
    outcome = run("predict", *arguments, "model.pretrained_model_name_or_path=/nowhere")
    assert "note: 1 pairs have sides rounded down" in outcome.text
    assert Image.open(tmp_path / "out" / "preview.png").width > 500
    assert "no such folder" in run("predict", "task=preview", "data.root=/nowhere", ok=False).error


def test_samples_are_held_out_in_each_task(run, tiny, pairs, tmp_path):
    """And task=dry_run: tests/test_dry_run.py."""
    settings = [*cache_overrides(tiny, pairs, tmp_path / "cache")[1:], "data.val_count=3"]
    run("predict", "task=preview", *settings)
    assert (tmp_path / "unused" / "preview.png").is_file()
    assert encoded(run("predict", "task=cache", *settings)) == 8
    nothing = run("train", *short(tiny, pairs, tmp_path / "run", 1), "data.val_count=8", ok=False).error
    assert "data.val_count=8 of 8 pairs leaves none to learn from: at most data.val_count=7" in nothing


def test_what_is_no_file_stops_the_build_or_is_left_out(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 4)
    for number, kind in enumerate(("pipe", "dangling")):
        (root / "control_images" / f"0{number}.png").unlink()
        unreadable(root / "control_images" / f"0{number}.png", kind)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    assert "2 unusable: cannot read the image" in run("predict", *command, ok=False).error
    assert encoded(run("predict", *command, "data.on_bad_image=skip")) == 2
    text = run("train", *short(tiny, root, tmp_path / "run", 1), "data.on_bad_image=skip").text
    assert "skipped 2 unusable" in text


def test_name_of_any_bytes_is_cached_trained_on_held_out_and_shown(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 3)
    for path in list(root.rglob("0[01].*")):
        path.rename(path.with_name(os.fsdecode(b"caf\xe9" + path.name.encode())))
    samples = ["callbacks.sample_images.num_inference_steps=1", "sample_every=0", "data.val_count=1"]
    arguments = [a for a in short(tiny, root, tmp_path / "run", 1) if "sample_images" not in a]
    run("train", *arguments, *samples)
    assert (tmp_path / "run" / "report.html").is_file()
    assert (only(tmp_path / "cache").folder / "preview.png").is_file()
    (root / "control_images" / "02.png").rename(root / "control_images" / f"{'ä' * 120}.png")
    edit = [f"lora={tmp_path / 'run'}", f"image={root}/control_images", "prompt=x", "num_inference_steps=1"]
    run("predict", *edit, f"output_dir={tmp_path / 'out'}")
    assert len(list((tmp_path / "out").glob("*.png"))) == 3


@pytest.mark.parametrize("name", ["manifest.json", "index.jsonl"])
def test_damaged_list_of_a_cache_is_rebuilt_and_of_given_shards_is_refused(run, tiny, pairs, tmp_path, name):
    command = cache_overrides(tiny, pairs, tmp_path / "cache")
    run("predict", *command)
    path = only(tmp_path / "cache").folder / name
    path.write_text("{}" if name == "manifest.json" else path.read_text().replace('"offset": ', '"offset": 9'))
    given = [*short(tiny, "null", tmp_path / "run", 1), f"data.shards={path.parent}"]
    error = run("train", *given, ok=False).error
    assert f"{path} is damaged" in error
    assert "copy it again" in error
    assert encoded(run("train", *short(tiny, pairs, tmp_path / "run", 1))) == 0
    run("train", *given, f"output_dir={tmp_path / 'again'}")


def test_old_caches_are_named_first_and_deleted_when_told(run, tiny, pairs, tmp_path):
    command = cache_overrides(tiny, pairs, tmp_path / "cache")
    run("predict", *command)
    kept = only(tmp_path / "cache").folder
    run("predict", *command, "model.max_sequence_length=32")
    clean = ["task=clean", *command[1:]]
    outcome = run("predict", *clean)
    assert "8 samples of FluxKontext" in outcome.text
    assert "delete=true frees" in outcome.text
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2
    assert "freed" in run("predict", *clean, "delete=true").text
    assert only(tmp_path / "cache").folder == kept
    assert "nothing to free" in run("predict", *clean, "delete=true").text
    assert only(tmp_path / "cache").manifest()["samples"] == 8


def test_builds_of_one_cache_wait_for_each_other(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "pairs", [(32, 32)] * 30)
    command = cache_overrides(tiny, root, tmp_path / "cache")
    processes = [start("predict", *command) for _ in range(2)]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert sorted("encoded 30 samples" in text for text in texts) == [False, True]
    assert len(only(tmp_path / "cache").sample_ids()) == 30


def test_task_that_does_not_exist(run):
    assert (
        "task=catch: choose edit, cache, preview, clean, quantize or compare_precision"
        in run("predict", "task=catch", ok=False).error
    )


def test_command_that_trains_on_a_cache_is_quoted(run, tiny, tmp_path):
    root = make_pairs(tmp_path / "my pairs, [old]", [(32, 32)] * 2)
    text = run("predict", *cache_overrides(tiny, root, tmp_path / "a cache")).text
    [command] = [line.partition("train on it: ")[2] for line in text.splitlines() if "train on it: " in line]
    python, script, *arguments = shlex.split(command)
    assert (python, script) == ("python", "train.py")
    data = compose("train", *quote_values(arguments)).data
    assert (data.root, data.cache_dir) == (str(root), str(tmp_path / "a cache"))
