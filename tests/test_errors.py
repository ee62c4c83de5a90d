"""Settings that cannot be: one line that says what and what to do, exit status 1, and nothing lost."""

import errno
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

from cli.check_keys import TASKS, declared
from cli.check_values import check_shards
from cli.resuming import check_resumable, find_checkpoint, start_again
from cli.terminal import line_for_users
from foundation.errors import UserError
from lightning_modules.lora_files.reading import find_weights
from runs.run_folder import RunFolder
from tests.support.commands import ROOT, compose, lora_bytes, short


def test_lora_of_another_model(refuses, gallery, tiny, tmp_path):
    from tests.support.tiny_pipelines import build_pipeline

    folder = gallery("plain").folder
    build_pipeline(tmp_path / "wide", seed=1, heads=6)
    wide = f"model.pretrained_model_name_or_path={tmp_path / 'wide'}"
    words = ("does not fit", ", in the model ", f"it was trained on {tiny.name}")
    refuses(wide, f"adapter.init_from={folder}", "data.cache_dir=null", words=words)
    refuses(f"lora={folder}", wide, "prompt=x", "width=32", "height=32", script="predict", words="does not fit")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("adapter.target_modules=[to_z]", ("to_z matches no linear layer of FluxTransformer2DModel", "attn.to_q")),
        ("adapter.init_from=/nowhere", "no such file or folder"),
        ("model.devices.vae=cuda:7", "model.devices.vae=cuda:7: this machine has cpu"),
        ("model.devices.transformer=gpu7", "model.devices.transformer=gpu7 is not a device"),
        ("trainer.accelerator=gpu", "PyTorch finds no GPU that it can use. Found no NVIDIA driver"),
        ("model.dtype=float8", "model.dtype=float8: choose float32 or bfloat16"),
        ("adapter.target_modules='*.to_q'", "is not a regular expression"),
        ("adapter.target_modules=[to_q,to_kk]", "to_kk matches no linear layer"),
        ("model.devices.transformer=cpu trainer.devices=2", "choose one"),
        ("callbacks.metrics=null", "callbacks.progress shows what callbacks.metrics measures"),
        ("trainer.max_epochs=3", "Pass trainer.max_steps, 3 x samples / (data.batch_size"),
        ("ckpt_path=/nowhere.ckpt", "there is no checkpoint /nowhere.ckpt"),
        ("data.on_missing=ignore", "choose error or skip"),
        ("data.shards=/shards", "both are set"),
        ("model.revision=v9 model.pretrained_model_name_or_path=owner/name", "huggingface.co cannot be reached"),
    ],
)
def test_impossible_setting(refuses, override, words):
    refuses(*override.split(" "), words=words)


def test_wrong_root_is_refused_before_the_hub_is_queried(run, tmp_path):
    error = run("predict", "task=cache", "model=flux_kontext", f"data.root={tmp_path}/nowhere", ok=False).error
    assert f"data.root={tmp_path}/nowhere: no such folder" in error


def test_run_is_not_overwritten(run, gallery, copied, tiny, pairs):
    folder = copied(gallery("plain"))
    before, last = lora_bytes(folder), folder / "checkpoints" / "last.ckpt"

    def refused(*more):
        return run("train", *short(tiny, pairs, folder, 2), *more, ok=False).error

    assert "already contains a run: resume it with ckpt_path=last" in refused()
    last.write_bytes(last.read_bytes()[:-1000])
    error = refused("ckpt_path=last")
    assert f"{last} is damaged (File is not a zip file); name another ckpt_path, or start from" in error
    last.unlink()
    for line in (error, refused(), refused("ckpt_path=last")):  # the weights were written, and the process killed
        assert f"adapter.init_from={folder / 'lora' / 'last'}" in line
    assert lora_bytes(folder) == before


class Trap:
    """A pickle that runs code when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: path.write_bytes(b""), "File is not a zip file"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "is damaged ("),
        (lambda path: torch.save({"global_step": Trap(path.with_name("trap"))}, path), "which is not run"),
        (lambda path: torch.save({"to_q.lora_A.weight": torch.zeros(2)}, path), "is damaged ('state_dict')"),
        (lambda path: torch.save(torch.zeros(2), path), "is damaged ("),
    ],
)
def test_file_that_is_no_checkpoint(tmp_path, write, words):
    path = tmp_path / "run" / "checkpoints" / "x.ckpt"
    path.parent.mkdir(parents=True)
    write(path)
    with pytest.raises(UserError) as raised:
        find_checkpoint(str(path), None, RunFolder(tmp_path / "new"))
    assert words in str(raised.value)
    assert str(raised.value).endswith("name another ckpt_path, or start again")
    assert "\n" not in str(raised.value)
    assert not path.with_name("trap").exists()


@pytest.mark.parametrize("text", ["", "[", "adapter: {}", "\ud800"])
def test_damaged_settings_of_a_resumed_run_are_one_line(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text, errors="surrogatepass")
    groups = {group: {"x": 1} for group in ("adapter", "optimizer", "scheduler", "model", "data")}
    with pytest.raises(UserError) as raised:
        check_resumable(groups, RunFolder(tmp_path))
    assert str(tmp_path / "config.yaml") in str(raised.value)
    assert "remove the file, to resume without comparing the settings" in str(raised.value)


def test_settings_of_something_else_are_not_taken_away(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: true")
    (tmp_path / "samples").mkdir()
    with pytest.raises(UserError, match=r"config.yaml is not a run's: choose another output_dir"):
        start_again(RunFolder(tmp_path))
    assert (tmp_path / "samples").is_dir()


def test_weights_of_a_full_run_are_no_lora(tmp_path):
    (tmp_path / "model" / "last").mkdir(parents=True)
    with pytest.raises(UserError, match=f"pretrained_model_name_or_path={tmp_path}/model/last"):
        find_weights(tmp_path)


def test_image_settings_next_to_shards():
    cfg = compose("train", "data.shards=s3://bucket/folder", "data.batch_size=3", "data.seed=5")
    check_shards(cfg)
    cfg.data.resolution = 512
    with pytest.raises(UserError, match=r"^data.resolution=512 applies to images, and data.shards=s3"):
        check_shards(cfg)


def test_checkpoint_of_another_adapter(run, gallery, copied, tiny, pairs):
    folder = copied(gallery("plain"))
    (folder / "config.yaml").unlink()  # which would name the changed setting
    more = ["ckpt_path=last", "adapter.target_modules=[to_q]"]
    outcome = run("train", *short(tiny, pairs, folder, 2), *more, ok=False)
    assert "the checkpoint's adapter is not this run's" in outcome.error


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of its own, of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 30_000, 200_000])
def test_full_disk_leaves_the_previous_files(run, runs, disk, tiny, pairs, room, monkeypatch):
    """A full disk stops the run before its LoRA, before its checkpoint, or at once; then the run resumes bitwise."""
    monkeypatch.setattr("callbacks.lora_checkpoint.disk_usage", lambda _: SimpleNamespace(free=2**40))
    folder, constant = Path(shutil.copytree(runs(2, "scheduler=constant").folder, disk / "run")), "scheduler=constant"
    before, table = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}, folder / "metrics.csv"
    command = [*short(tiny, pairs, folder, 3), constant, "ckpt_path=last"]
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - room))
    error = run("train", *command, ok=False).error
    assert "No space left on device" in error
    assert {path.name for path, content in before.items() if path.read_bytes() != content} <= {
        "config.yaml",
        "log.txt",
        table.name,
    }
    assert table.read_bytes().startswith(before[table])
    assert not [path for path in folder.rglob("*.tmp") if path != RunFolder(folder).unfinished_checkpoint]
    (disk / "other").unlink()
    run("train", *command)
    assert lora_bytes(folder) == lora_bytes(runs(3, constant).folder)


def test_a_disk_without_room_for_the_run_is_refused_before_its_first_step(run, tiny, pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("callbacks.lora_checkpoint.disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    command = [*short(tiny, pairs, tmp_path / "run", 400), "save_every=1"]
    error = run("train", *command, ok=False).error
    assert re.search(
        r"writes weights of [\d.]+ MB and checkpoints of [\d.]+ kB, and 2\.0 MB are free\. .*save_every", error
    )
    assert not list((tmp_path / "run").rglob("*.safetensors"))
    run("train", *short(tiny, pairs, tmp_path / "run", 2), "save_every=1")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounts a file system")
def test_a_full_shm_is_one_line_and_ends_the_run(tiny, pairs, tmp_path):
    """Fill it as Docker does with its 64 MB; a worker that cannot hand over its batch used to leave the run waiting."""
    settings = [*short(tiny, pairs, tmp_path / "run", 2, "pairs"), "data.num_workers=2", "data.batch_size=4"]
    mounted = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {sys.executable} {ROOT}/train.py {' '.join(settings)}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mounted], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].startswith("error: a data worker has ended, because /dev/shm or the memory is")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "free", "named"),
    [
        (RuntimeError("DataLoader worker (pid 12) is killed by signal: Bus error. It is possible"), 2**40, True),
        (RuntimeError("DataLoader worker (pid(s) 3, 4) exited unexpectedly"), 2**40, True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), 2**40, True),
        (OSError(errno.ENOSPC, "No space left on device"), 0, True),
        (OSError(errno.ENOSPC, "No space left on device"), 2**40, False),
        (OSError(errno.ENOSPC, "No space left on device", "/out/run/last.ckpt"), 0, False),
    ],
)
def test_lost_data_workers_name_the_shared_memory(monkeypatch, error, free, named):
    monkeypatch.setattr("cli.terminal.disk_usage", lambda _: SimpleNamespace(free=free))
    assert ("docker run --shm-size=8g" in line_for_users(error)) == named


def test_compiling_that_fails_is_one_line():
    error = torch._dynamo.exc.InternalTorchDynamoError("backend='inductor' raised:\nNo C++ compiler found in x\n\nmore")
    assert line_for_users(error) == "torch.compile failed: No C++ compiler found in x. Set model.compile=false."


def test_out_of_memory_names_settings():
    line = line_for_users(torch.OutOfMemoryError("CUDA out of memory"))
    for key in re.findall(r"\b[a-z_]+(?:[./][a-z_]+)+", line):
        assert any(declared(script).knows(key.replace("/", ".")) for script in TASKS), key
