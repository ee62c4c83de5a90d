"""output_dir=s3://...: runs that are resumed on a machine that contains nothing of them."""

import json
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import obstore
import pytest

from cli import uploads as module
from cli.resolvers import work_folder
from cli.terminal import configure_logging
from cli.uploads import Mirror
from foundation.errors import UserError
from foundation.files import replacing
from runs.run_folder import RunFolder
from tests.support.commands import kill_when, lora_bytes, short
from tests.support.several_runs import start_two

URL = "s3://own/of/snow"


@pytest.fixture(autouse=True)
def poll(monkeypatch):
    monkeypatch.setattr(module, "POLL", 0.1)
    monkeypatch.setattr(module, "TRIES", 1)


def names(bucket):
    return {one.key.removeprefix("of/snow/") for one in bucket.objects.all()}


def test_a_fresh_machine_resumes_from_a_bucket_in_the_same_bits(bucket, run, runs, start, tiny, pairs, tmp_path):
    settings = ["save_every=1", "scheduler=constant"]
    whole = runs(4, *settings, "keep_checkpoints=3").folder
    command = [*short(tiny, pairs, URL, 4), *settings, "resume=auto"]
    process = start("train", *command, "+callbacks.hold={_target_: tests.support.hold.Hold, step: 3}", cwd=tmp_path)
    kill_when(lambda: "checkpoints/step-000002.ckpt" in names(bucket), process)
    shutil.rmtree(tmp_path / "outputs")  # another machine

    text = run("train", *command).text
    assert f"downloading {URL}" in text
    assert f"uploaded to {URL}" in text
    folder = tmp_path / work_folder(URL)
    assert lora_bytes(folder) == lora_bytes(whole)
    assert names(bucket) == RunFolder(folder).files().keys()
    assert "checkpoints/step-000002.ckpt" not in names(bucket), "rotated out"

    fresh = [one for one in command if one != "resume=auto"]
    assert f"output_dir={URL} already contains a run. Resume" in run("train", *fresh, ok=False).error


@pytest.fixture
def mirror(bucket, tmp_path):
    """A copy of an empty folder."""
    configure_logging()
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    return Mirror(URL, folder)


@pytest.fixture
def elsewhere(tmp_path):
    folder = RunFolder(tmp_path / "elsewhere")
    folder.path.mkdir()
    return folder


def save(run, step, files=()):
    """Save a checkpoint of this step, as the last one of a run, and other files."""
    run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "metrics.csv", *files):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(f"of step {step}")
    with replacing(run.checkpoint) as path:
        path.write_text(f"of step {step}")


def started(run):
    """A copy of this folder, as a start makes it."""
    copy = Mirror(URL, run)
    copy.download(resumes=True)
    return copy


def content(run):
    return {name: (run.path / name).read_bytes() for name in run.files()}


def test_a_run_continues_while_its_bucket_is_away_and_is_uploaded_at_its_end(mirror, bucket, monkeypatch, capfd):
    put, away = obstore.put, [True]

    def fail(*args, **more):
        if away:
            raise ConnectionResetError("reset")
        return put(*args, **more)

    monkeypatch.setattr(obstore, "put", fail)
    mirror.download(resumes=True)
    mirror.thread.start()
    save(mirror.run, 2)
    while not mirror.failure:
        time.sleep(0.02)
    line = rf"note: not uploaded: output_dir: {URL}/\S+ cannot be written: reset \(5 attempts\)\. The next upload"
    assert len(re.findall(line, capfd.readouterr().err)) == 1, "once for each checkpoint"
    assert not names(bucket)
    away.clear()
    assert mirror.finish() == ""
    assert names(bucket) == {"config.yaml", "metrics.csv", "checkpoints/last.ckpt"}


def test_a_checkpoint_is_uploaded_after_the_files_that_it_needs(mirror, bucket, monkeypatch):
    save(mirror.run, 2, ["checkpoints/step-000001.ckpt", "finished.json"])
    order, put = [], obstore.put

    def noted(store, name, content, **more):
        order.append(name.rpartition("/")[2])
        if order[-1] == "config.yaml":  # meanwhile the run saves again
            save(mirror.run, 4)
        return put(store, name, content, **more)

    monkeypatch.setattr(obstore, "put", noted)
    mirror.upload()
    assert order[-2:] == ["last.ckpt", "finished.json"]
    last = bucket.Object("of/snow/checkpoints/last.ckpt").get()["Body"].read()
    assert last == b"of step 2", "the weights of the newer one may not be there"
    mirror.upload()
    assert sorted(order[5:7]) == ["config.yaml", "metrics.csv"]
    assert order[7:] == ["last.ckpt"]


def test_a_download_that_is_broken_off_or_wrong_is_completed(mirror, elsewhere, monkeypatch, capfd):
    """The next download completes it after a kill at any file, onto an earlier state; so does a retry."""
    save(mirror.run, 2)
    mirror.upload()
    older = content(mirror.run)
    save(mirror.run, 4, ["lora/last/weights.safetensors", "finished.json", "checkpoints/step-000002.ckpt"])
    started(elsewhere)
    assert content(elsewhere) == older
    mirror.upload()
    get, answers = obstore.get, []

    def unreliable(store, path, **more):
        got = get(store, path, **more)
        if more:
            return got
        if not answers:
            raise KeyboardInterrupt
        wrong = SimpleNamespace(stream=lambda: iter([b"wrong"]), attributes=got.attributes, meta=got.meta)
        return {"right": got, "wrong": wrong}[answers.pop(0)]

    monkeypatch.setattr(obstore, "get", unreliable)
    for count in range(6):
        answers[:] = ["right"] * count
        with pytest.raises(KeyboardInterrupt):
            started(elsewhere)
        assert elsewhere.checkpoint.read_bytes() == older["checkpoints/last.ckpt"], "the last checkpoint comes last"
    answers[:] = ["wrong", *["right"] * 6]
    for _ in range(2):  # the second time there is nothing to download
        started(elsewhere)
        assert content(elsewhere) == content(mirror.run)
    assert "is not as it was uploaded; attempt 2" in capfd.readouterr().err


def test_the_newer_side_replaces_the_other_unless_both_have_changed(mirror, elsewhere, bucket):
    """After a kill between a checkpoint and its upload; the console of S3 has created empty objects for folders."""
    for key in ("of/snow/", "of/snow/checkpoints/"):
        bucket.put_object(Key=key)
    save(mirror.run, 2)
    mirror.upload()
    save(mirror.run, 4)
    started(mirror.run).upload()
    assert mirror.run.checkpoint.read_text() == "of step 4"
    there = started(elsewhere)
    assert content(elsewhere) == content(mirror.run)
    (mirror.run.path / "metrics.csv").write_text("a step that was not saved")
    save(elsewhere, 6)
    there.upload()
    resumed = started(mirror.run)
    assert content(mirror.run) == content(elsewhere)

    save(elsewhere, 8)
    there.upload()
    save(mirror.run, 10)
    mine = content(mirror.run)
    with pytest.raises(UserError, match=f"output_dir={URL}: it and {mirror.run} contain different checkpoints. Remove"):
        started(mirror.run)
    resumed.thread.start()
    assert f"{mirror.run} is not completely there: another machine has saved a checkpoint there" in resumed.finish()
    assert content(mirror.run) == mine
    assert bucket.Object("of/snow/checkpoints/last.ckpt").get()["Body"].read() == b"of step 8"


@pytest.mark.parametrize("arrives", [False, True])
def test_a_run_that_is_killed_while_it_uploads_a_checkpoint_resumes(mirror, bucket, monkeypatch, arrives):
    """The run resumes whether or not the checkpoint has arrived."""
    save(mirror.run, 2)
    mirror.upload()
    save(mirror.run, 4)
    put = obstore.put

    def killed(store, name, *args, **more):
        if not name.endswith("last.ckpt"):
            return put(store, name, *args, **more)
        if arrives:
            put(store, name, *args, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(obstore, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            mirror.upload()
    save(mirror.run, 6)  # it was killed a little later
    again = started(mirror.run)
    assert mirror.run.checkpoint.read_text() == "of step 6"
    again.upload()
    assert again.failure == ""


def test_a_job_is_queued_again_when_all_of_it_is_uploaded(bucket, run, tiny, pairs, tmp_path, monkeypatch):
    """`scontrol requeue` ends the job that calls it."""
    monkeypatch.setattr(module, "POLL", 1000.0)
    folder, places = tmp_path / work_folder(URL), tmp_path / "bin"
    places.mkdir()
    script = places / "scontrol"
    script.write_text(f"#!/bin/sh\ncp {folder}/.mirror.json {tmp_path}/at_requeue.json\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(places), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    stop_at = "+callbacks.stop={_target_: tests.support.probes.StopAt, step: 2, signals: [SIGUSR1]}"
    outcome = run("train", *short(tiny, pairs, URL, 8), "resume=auto", stop_at, ok=False)
    assert outcome.status == 128 + signal.SIGUSR1, outcome.text
    assert "job 7 is queued again" in outcome.text
    files = json.loads((tmp_path / "at_requeue.json").read_text())["files"]
    assert files["checkpoints/last.ckpt"][0] == (folder / "checkpoints" / "last.ckpt").stat().st_size
    assert files.keys() == names(bucket)


@pytest.mark.slow
def test_processes_of_a_fresh_machine_download_a_run_once(bucket, run, start, tiny, pairs, tmp_path):
    """Processes start as under torchrun: at the same time, without knowing of each other."""
    settings = ["save_every=2", "scheduler=constant", "resume=auto"]
    run("train", *short(tiny, pairs, URL, 2), *settings)
    shutil.rmtree(tmp_path / "outputs")
    processes = start_two(start, [[*short(tiny, pairs, URL, 4), *settings]], cwd=tmp_path)
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert sum(text.count("downloading") for text in texts) == 1, texts


def test_a_process_that_lightning_has_started_downloads_nothing(mirror, bucket, elsewhere, monkeypatch):
    """The machine's first process, which started it, is already at work in the folder."""
    save(mirror.run, 2)
    mirror.upload()
    for rank, downloads in (("1", False), ("0", True)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with module.mirrored(URL, elsewhere.path, resumes=True):
            assert elsewhere.config.exists() == downloads


@pytest.mark.parametrize("lost", ["bucket", "note", "folder"])
def test_the_bucket_is_complete_after_a_loss(mirror, bucket, lost):
    """A folder that is removed, or on a disk that is not mounted any more, does not empty the bucket."""
    save(mirror.run, 2, ["lora/last/weights.safetensors"])
    mirror.upload()
    everything = names(bucket)
    if lost == "folder":
        shutil.rmtree(mirror.run.path)
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                mirror.upload()
            mirror.run.path.mkdir(exist_ok=True)
    else:
        if lost == "note":
            mirror.note.write_text("{")
        for name in everything if lost == "bucket" else ():
            bucket.Object(f"of/snow/{name}").delete()
        started(mirror.run).upload()
    assert names(bucket) == everything


def test_a_last_upload_that_fails_or_takes_too_long_is_one_line(mirror, monkeypatch):
    problem, go = f"output_dir={URL}: {mirror.run} is not completely there: ", threading.Event()
    monkeypatch.setattr(module, "WHEN_STOPPED", 0.1)
    monkeypatch.setattr(Mirror, "upload", lambda self: 1 / 0)
    with pytest.raises(UserError, match=problem + "division"), module.mirrored(URL, mirror.run.path, True):
        pass
    monkeypatch.setattr(Mirror, "upload", lambda self: go.wait(20))
    with pytest.raises(RuntimeError) as failed, module.mirrored(URL, mirror.run.path, True):
        raise RuntimeError
    assert failed.value.__notes__ == [problem + "there was no time"]
    go.set()
