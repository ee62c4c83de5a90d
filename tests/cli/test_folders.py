"""Two commands never write to one folder."""

import os
import platform
import signal
import subprocess
import sys
import time

import pytest

from cli.folders import BEGINS, new_folder
from foundation.errors import UserError
from foundation.locks import LOCK, Holder, holder, in_use
from tests.support.commands import ROOT, wait_until

PICTURES = ["prompt=[a,b]", "width=32", "height=32", "num_inference_steps=1"]
HOLD = """
import os, sys, time
from pathlib import Path
from foundation.locks import in_use
with in_use(Path(sys.argv[1])):
    if not os.fork():  # its worker, which has let the lock go
        print("held", flush=True)
    time.sleep(100)
"""


def test_folders_of_one_second_differ(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert new_folder("x") == "outputs/x"
    assert not (tmp_path / "outputs").exists(), "what is only shown makes no folder"
    token = BEGINS.set(True)
    assert [new_folder("x") for _ in range(3)] == ["outputs/x", "outputs/x-2", "outputs/x-3"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert new_folder("x") == "outputs/x-3", "processes of a run go where the first one goes"
    BEGINS.reset(token)


@pytest.fixture
def command(tmp_path):
    """Start a process that holds the lock of tmp_path and has a data worker, which outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
    )
    process.stdout.readline()
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_folder_in_use_is_refused_until_its_process_ends_however_that_is(command, tmp_path):
    with pytest.raises(UserError, match=r"is in use by another command"), in_use(tmp_path):
        pass
    assert holder(tmp_path) == Holder(platform.node(), command.pid), "who is refused changes nothing"
    command.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, command.pid, os.WEXITED | os.WNOWAIT)
    assert holder(tmp_path) is None, "a zombie"
    with in_use(tmp_path):
        assert holder(tmp_path) == Holder(platform.node(), os.getpid())
        with pytest.raises(UserError), in_use(tmp_path):  # asking has not opened it
            pass
    assert not (tmp_path / LOCK).exists()
    assert holder(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "known"),
    [
        ("", None),
        (f" {platform.node()} {os.getpid()} {time.time() - 1e6}", None),  # another process had this id
        (f" {platform.node()} {2**22 + 1} {time.time()}", None),
        (f" elsewhere {os.getpid()} 1.5", Holder("elsewhere", os.getpid())),
    ],
    ids=["being taken", "other process", "no process", "other host"],
)
def test_lock_file_that_was_left_names_no_holder_of_this_host(tmp_path, content, known):
    (tmp_path / LOCK).write_text(content)
    assert holder(tmp_path) == known


def test_file_systems_without_locks_are_noted_and_used(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with in_use(tmp_path):
        assert holder(tmp_path) == Holder(platform.node(), os.getpid())
    assert "no locks in" in caplog.text


@pytest.mark.parametrize(
    ("output_dir", "words"),
    [
        ("/etc/passwd", "output_dir=/etc/passwd cannot be made (File exists): choose another folder"),
        (None, "output_dir=outputs/"),  # the working directory is read-only
    ],
)
def test_folder_that_cannot_be_made_is_one_line(run, monkeypatch, output_dir, words):
    monkeypatch.chdir("/proc/self")
    where = [] if output_dir is None else [f"output_dir={output_dir}"]
    assert words in run("train", *where, "model=flux_kontext", ok=False).error


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("train", "s3://me:secret@own/of/snow"),
        ("train", "file:///tmp/run"),
        ("predict", "gs://own/x"),
        ("train", "az://own/x -m"),
        ("train", "hf://buckets/owner/name"),
    ],
)
def test_output_in_a_bucket_is_refused_with_the_way_to_copy_it(run, monkeypatch, tmp_path, command, place):
    monkeypatch.chdir(tmp_path)
    given = PICTURES if command == "predict" else ["model=flux_kontext", "data.root=x"]
    error = run(command, *given, *f"output_dir={place}".split(), ok=False).error
    assert "is no folder of this machine. Choose one, and copy it: rclone sync FOLDER REMOTE:PATH" in error
    assert "secret" not in error
    assert not list(tmp_path.iterdir())


def test_processes_started_by_another_launcher_need_an_output_dir(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RETOUCH_OUTPUT_DIR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "need output_dir=FOLDER" in run("predict", *PICTURES, ok=False).error
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_of_a_prediction_write_to_one_folder_and_stop_together(start, tmp_path):
    """Only the first one is told to stop."""
    two = [*PICTURES, "num_images_per_prompt=2000", "trainer.devices=2", "trainer.strategy=ddp"]
    process = start("predict", *two, "trainer.accelerator=cpu", cwd=tmp_path)
    prompts = [f"*/image_p{number:02d}*.png" for number in range(2)]
    wait_until(lambda: all(any((tmp_path / "outputs").glob(prompt)) for prompt in prompts), process, 240)
    os.kill(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, text
    [folder] = (tmp_path / "outputs").iterdir()
    assert f"stopped by SIGTERM; finished images are in outputs/{folder.name}" in text
    assert "Traceback" not in text

    def counts() -> set[int]:
        return {len(list(folder.glob("*.png"))), len((folder / "predictions.jsonl").read_text().splitlines())}

    wait_until(lambda: len(counts()) == 1, seconds=60)  # the other process ends its image by itself
    assert 2 <= min(counts()) < 4000
