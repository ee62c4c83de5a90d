"""output_dir=s3://...: runs that are resumed on a machine that has nothing of them."""

import json
import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import boto3
import pytest
import torch

from callbacks.run_folder import RunFolder
from datamodules.errors import UserError
from datamodules.shards import transfer
from tasks import mirror as module
from tasks.mirror import Mirror
from tasks.resolvers import local_folder
from tasks.terminal import configure_logging
from tests.datamodules.shards.conftest import moto_server, s3  # noqa: F401
from tests.support.commands import kill_when, lora_bytes, short
from tests.support.several_runs import start_two

URL = "s3://runs/of/snow"


@pytest.fixture
def bucket(s3, tmp_path, monkeypatch):  # noqa: F811
    """An empty bucket, and a machine that has nothing of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "LOOK", 0.1)
    client = boto3.client("s3")
    client.create_bucket(Bucket="runs")
    yield client
    for one in client.list_objects_v2(Bucket="runs").get("Contents", []):
        client.delete_object(Bucket="runs", Key=one["Key"])
    client.delete_bucket(Bucket="runs")


def names(bucket):
    return {one["Key"].removeprefix("of/snow/") for one in bucket.list_objects_v2(Bucket="runs").get("Contents", [])}


def here(folder):
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {str(path) for path in paths if not any(part.startswith(".") for part in path.parts)}


def test_a_fresh_machine_resumes_from_a_bucket_in_the_same_bits(bucket, run, start, tiny, pairs, tmp_path):
    settings = ["save_every=2", "scheduler=constant"]
    run("train", *short(tiny, pairs, tmp_path / "whole", 8), *settings)
    command = [*short(tiny, pairs, URL, 8), *settings, "resume=auto"]
    process = start("train", *command, "+callbacks.hold={_target_: tests.support.hold.Hold, step: 5}", cwd=tmp_path)
    folder = tmp_path / local_folder(URL)
    kill_when(lambda: "checkpoints/step-000002.ckpt" in names(bucket), process)
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
    shutil.rmtree(tmp_path / "outputs")  # another machine

    text = run("train", *command).text
    assert f"downloading {URL}" in text
    assert f"uploaded to {URL}" in text
    assert lora_bytes(folder) == lora_bytes(tmp_path / "whole")
    assert names(bucket) == here(folder)
    assert "checkpoints/step-000002.ckpt" not in names(bucket), "what is rotated out goes there too"

    shutil.rmtree(tmp_path / "outputs")
    assert "is finished, at step 8" in run("train", *command).text
    assert "downloading" not in run("train", *command).text
    shutil.rmtree(tmp_path / "outputs")
    fresh = [one for one in command if one != "resume=auto"]
    assert (
        f"output_dir={URL} already contains a run: resume it with resume=auto" in run("train", *fresh, ok=False).error
    )


@pytest.fixture
def mirror(bucket, tmp_path):
    configure_logging()
    folder = RunFolder(tmp_path / "run")
    folder.config.parent.mkdir()
    folder.config.write_text("a")
    return Mirror(URL, folder)


def test_a_run_goes_on_while_its_bucket_is_away_and_is_uploaded_afterwards(mirror, bucket, monkeypatch, capfd):
    import obstore

    def fail(*args, **more):
        raise ConnectionResetError("reset")

    with monkeypatch.context() as away:
        away.setattr(obstore, "put", fail)
        assert [mirror._try(), mirror._try()] == ["reset", "reset"]
        said = f"note: {URL}: reset; the run goes on, and is uploaded when that is over\n"
        assert capfd.readouterr().err == said, "once"
        at_its_end = Mirror(URL, mirror.run)
        at_its_end.start()
        with pytest.raises(UserError, match=r"run is not all in s3://runs/of/snow: reset; the same command uploads it"):
            at_its_end.finish(0.2)
        at_its_end._thread.join()
        capfd.readouterr()
    assert mirror._try() is None
    assert capfd.readouterr().err == f"{URL} has all of the run again\n"
    assert names(bucket) == {"config.yaml"}


def test_a_checkpoint_comes_after_what_belongs_to_it(mirror, bucket, monkeypatch):
    import obstore

    checkpoints = mirror.run.checkpoint.parent
    checkpoints.mkdir()
    for name in ("last.ckpt", "step-000002.ckpt"):
        (checkpoints / name).write_text(name)
    mirror.run.finished.write_text("that it is finished")
    order, put = [], obstore.put

    def noted(store, name, content, **more):
        order.append(name.rpartition("/")[2])
        if order[-1] == "config.yaml":  # meanwhile the run saves again
            mirror.run.checkpoint.write_text("newer")
        return put(store, name, content, **more)

    monkeypatch.setattr(obstore, "put", noted)
    mirror._upload()
    assert order == ["config.yaml", "step-000002.ckpt"]
    mirror._upload()
    assert order[2:] == ["last.ckpt", "finished.json"]


def test_a_folder_with_another_run_is_not_written_over(mirror, bucket, tmp_path):
    mirror.run.checkpoint.parent.mkdir()
    mirror.run.checkpoint.write_text("a")
    mirror._upload()
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    other.config.write_text("b")
    with pytest.raises(UserError, match="both contain a run: remove the folder, or choose another output_dir"):
        Mirror(URL, other).fetch(resumes=True)
    assert other.config.read_text() == "b"
    Mirror(URL, mirror.run).fetch(resumes=True)
    assert mirror.run.config.read_text() == "a"


def test_a_download_that_is_not_what_was_uploaded_is_made_again(mirror, bucket, tmp_path, monkeypatch, capfd):
    mirror.run.checkpoint.parent.mkdir()
    for path in (mirror.run.checkpoint, mirror.run.metrics):
        path.write_text("right")
    mirror._upload()
    monkeypatch.setattr(transfer, "PAUSE", 0.01)
    import obstore

    get, wrong = obstore.get, []

    def flipped(store, name):
        got = get(store, name)
        if name in wrong:
            return got
        wrong.append(name)
        return SimpleNamespace(stream=lambda: iter([b"wrong"]), attributes=got.attributes, meta=got.meta)

    monkeypatch.setattr(obstore, "get", flipped)
    other = RunFolder(tmp_path / "other")
    Mirror(URL, other).fetch(resumes=True)
    assert (other.checkpoint.read_text(), other.metrics.read_text()) == ("right", "right")
    assert "metrics.csv is not what was uploaded; attempt 2" in capfd.readouterr().err


def save(run, step, files=()):
    """A checkpoint of this step, as the last one of a run, and other files."""
    run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    parts = {"state_dict": {}, "loops": {}, "optimizer_states": [], "lr_schedulers": [], "global_step": step}
    torch.save(parts, run.checkpoint)
    for name in ("config.yaml", "metrics.csv", *files):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(f"of step {step}")


def said(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def told(run):
    """What a run's folder holds, without what is noted of its copy."""
    return {name: content for name, content in said(run.path).items() if not name.startswith(".")}


@pytest.fixture
def elsewhere(tmp_path):
    return RunFolder(tmp_path / "elsewhere")


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("with_older", [False, True])
def test_a_download_that_is_broken_off_is_completed_by_the_next(mirror, elsewhere, monkeypatch, with_older, twice):
    """After each of its files, of a folder that was empty, or held an earlier state.

    Twice: of a run that was killed when its last checkpoint had got its second name, and was not yet replaced.
    """
    import obstore

    save(mirror.run, 2)
    mirror._upload()
    older = told(mirror.run)
    save(mirror.run, 4, ["lora/last/weights.safetensors", "finished.json", "checkpoints/step-000002.ckpt"])
    if twice:
        shutil.copy(mirror.run.checkpoint, mirror.run.checkpoint_of(4))
    if with_older:
        Mirror(URL, elsewhere).fetch(resumes=True)
        assert told(elsewhere) == older
    mirror._upload()
    get, gets = obstore.get, []

    def killed(store, path, options=None):
        if options is None:
            gets.append(path)
            if len(gets) > allowed:
                raise KeyboardInterrupt
        return get(store, path, options=options)

    monkeypatch.setattr(obstore, "get", killed)
    broken = 0
    for allowed in range(10):  # noqa: B007 (`killed` uses it)
        gets.clear()
        try:
            Mirror(URL, elsewhere).fetch(resumes=True)
            break
        except KeyboardInterrupt:
            broken += 1
            done = elsewhere.checkpoint.read_bytes() if elsewhere.checkpoint.exists() else None
            assert done == (older["checkpoints/last.ckpt"] if with_older else None), "the last checkpoint comes last"
    assert broken >= 3
    assert told(elsewhere) == told(mirror.run)
    gets.clear()
    Mirror(URL, elsewhere).fetch(resumes=True)
    assert not gets


@pytest.mark.parametrize(("here", "there"), [(4, 2), (2, 4), (4, 4), (None, 4), (4, None)])
def test_of_a_folder_and_its_copy_the_one_with_more_steps_is_resumed(mirror, elsewhere, bucket, here, there):
    """Also where what the bucket calls its checkpoint is not known here. None: a checkpoint that is damaged."""
    save(elsewhere, 1)
    copy = Mirror(URL, elsewhere)
    copy._upload()
    for run, step in ((elsewhere, here), (mirror.run, there)):
        save(run, step or 6)
        if step is None:
            run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:-30])
    kept, new = told(elsewhere), told(mirror.run)
    mirror.uploaded.read()
    mirror._upload()
    copy = Mirror(URL, elsewhere)
    copy.fetch(resumes=True)
    newer_here = (here or 0) >= (there or 0)
    assert told(elsewhere) == (kept if newer_here else new)
    copy.start()
    copy.finish()
    for name, content in told(elsewhere).items():
        assert bucket.get_object(Bucket="runs", Key=f"of/snow/{name}")["Body"].read() == content


def test_a_bucket_that_was_emptied_gets_all_of_the_run_again(mirror, bucket):
    save(mirror.run, 2)
    mirror._upload()
    everything = names(bucket)
    for name in everything:
        bucket.delete_object(Bucket="runs", Key=f"of/snow/{name}")
    again = Mirror(URL, mirror.run)
    again.fetch(resumes=True)
    again.start()
    again.finish()
    assert names(bucket) == everything


def test_a_folder_is_the_copy_of_one_bucket(mirror, bucket):
    """gs://runs/of/snow has the same folder on this machine as s3://runs/of/snow."""
    save(mirror.run, 2)
    mirror._upload()
    bucket.create_bucket(Bucket="other")
    with pytest.raises(UserError, match=r"run is the copy of s3://runs/of/snow, not of s3://other/of/snow: remove the"):
        Mirror("s3://other/of/snow", mirror.run).fetch(resumes=True)
    bucket.delete_bucket(Bucket="other")


def test_what_is_removed_here_is_removed_there_whatever_was_interrupted(mirror, bucket, monkeypatch):
    """An upload whose answer was lost, before the process was killed, and the file of which was removed then."""
    import obstore

    put = obstore.put

    def lost(*args, **more):
        put(*args, **more)
        raise ConnectionResetError("reset")

    kept = mirror.run.path / "metrics.csv"
    kept.write_text("kept")
    with monkeypatch.context() as interrupted:
        interrupted.setattr(obstore, "put", lost)
        assert mirror._try() == "reset"
    (first,) = names(bucket)
    (mirror.run.path / first).unlink()
    again = Mirror(URL, mirror.run)
    again.fetch(resumes=True)
    again.start()
    again.finish()
    assert names(bucket) == {"config.yaml", "metrics.csv"} - {first}


def test_a_stuck_upload_does_not_hold_a_process_that_is_to_leave(mirror, monkeypatch):
    import obstore

    go = threading.Event()
    monkeypatch.setattr(obstore, "put", lambda *args, **more: {"e_tag": str(go.wait(20))})
    mirror.start()
    started = time.monotonic()
    with pytest.raises(UserError, match=r"is not all in s3://runs/of/snow: \d s were not enough; the same command"):
        mirror.finish(0.3)
    assert time.monotonic() - started < 10
    go.set()


def test_what_nobody_has_thought_of_is_not_taken_for_uploaded(mirror, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda *args: None)
    monkeypatch.setattr(mirror, "_upload", lambda: 1 / 0)
    mirror.start()
    with pytest.raises(UserError, match="is not all in s3://runs/of/snow"):
        mirror.finish()


def test_a_job_is_queued_again_when_all_of_it_is_uploaded(bucket, run, tiny, pairs, tmp_path, monkeypatch):
    """`scontrol requeue` ends the job that calls it."""
    monkeypatch.setattr(module, "LOOK", 1000.0)
    folder, places = tmp_path / local_folder(URL), tmp_path / "bin"
    places.mkdir()
    script = places / "scontrol"
    script.write_text(f"#!/bin/sh\ncp {folder}/.mirror/uploaded.json {tmp_path}/at_requeue.json\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(places), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    stop = "+callbacks.stop={_target_: tests.support.probes.StopAt, step: 2, number: " + f"{int(signal.SIGUSR1)}}}"
    outcome = run("train", *short(tiny, pairs, URL, 8), "resume=auto", stop, ok=False)
    assert outcome.status == 128 + signal.SIGUSR1, outcome.text
    assert "job 7 is queued again" in outcome.text
    files = json.loads((tmp_path / "at_requeue.json").read_text())["files"]
    assert files["checkpoints/last.ckpt"][0] == (folder / "checkpoints" / "last.ckpt").stat().st_size
    assert files.keys() == names(bucket)


@pytest.mark.slow
def test_processes_of_a_fresh_machine_download_a_run_once(bucket, start, tiny, pairs, tmp_path):
    """As torchrun starts them: at the same time, and nobody yet knows of the others."""
    settings = ["save_every=2", "scheduler=constant", "resume=auto"]
    for steps in (2, 4):
        command = [*short(tiny, pairs, URL, steps), *settings, f"trainer.max_steps={steps}"]
        processes = start_two(start, [command], cwd=tmp_path)
        texts = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], texts
        assert sum(text.count("downloading") for text in texts) == (steps > 2), texts
        shutil.rmtree(tmp_path / "outputs")


def test_a_bucket_that_is_not_there_is_named_and_leaves_nothing(bucket, run, tiny, pairs, tmp_path):
    error = run("train", *short(tiny, pairs, tmp_path / "run", 1), "output_dir=s3://mistyped/run", ok=False).error
    assert re.fullmatch(r"error: output_dir: s3://mistyped/run\S* is not there: there is no bucket mistyped", error)
    assert not (tmp_path / "outputs" / "mistyped" / "run").exists()


def test_a_folder_that_is_gone_empties_no_bucket(mirror, bucket, capfd):
    """Removed, or on a disk that is not mounted any more; nor does a part of it that is replaced just now."""
    save(mirror.run, 2, ["lora/last/weights.safetensors"])
    mirror._upload()
    everything = names(bucket)
    away = mirror.run.path.with_name("away")
    mirror.run.path.rename(away)
    assert mirror._try() == f"{mirror.run.path}: No such file or directory"
    mirror.run.path.mkdir()
    assert mirror._try() is None
    assert names(bucket) == everything
    shutil.rmtree(mirror.run.path)
    away.rename(mirror.run.path)
    assert mirror._try() is None
    assert names(bucket) == everything


def test_what_is_replaced_while_it_is_looked_for_stays_in_the_bucket(mirror, bucket, monkeypatch):
    save(mirror.run, 2, ["lora/last/weights.safetensors"])
    mirror._upload()
    files_of, weights = module.files_of, "lora/last/weights.safetensors"
    monkeypatch.setattr(
        module, "files_of", lambda folder: {name: facts for name, facts in files_of(folder).items() if name != weights}
    )
    mirror._upload()
    assert weights in names(bucket)


def test_a_name_that_no_object_can_have_is_left_out(mirror, bucket, capfd):
    save(mirror.run, 2)
    (mirror.run.path / os.fsdecode(b"\xff.png")).write_text("a picture")
    assert [mirror._try(), mirror._try()] == [None, None]
    assert names(bucket) == {"config.yaml", "metrics.csv", "checkpoints/last.ckpt"}
    assert capfd.readouterr().err.count(r"note: s3://runs/of/snow: \udcff.png is left out: ") == 1
    (mirror.run.path / os.fsdecode(b"\xff.png")).unlink()
    save(mirror.run, 4)
    mirror.start()
    mirror.finish()
    assert bucket.get_object(Bucket="runs", Key="of/snow/metrics.csv")["Body"].read() == b"of step 4"


def test_folders_that_the_console_of_s3_has_made_are_no_files(mirror, elsewhere, bucket):
    for key in ("of/snow/", "of/snow/checkpoints/"):
        bucket.put_object(Bucket="runs", Key=key)
    save(mirror.run, 2)
    mirror._upload()
    Mirror(URL, elsewhere).fetch(resumes=True)
    assert told(elsewhere) == told(mirror.run)


def test_what_is_removed_while_it_is_downloaded_is_looked_for_again(mirror, elsewhere, bucket, monkeypatch):
    """By another machine, which rotates its checkpoints."""
    import obstore

    save(mirror.run, 2, ["checkpoints/step-000001.ckpt"])
    mirror._upload()
    get = obstore.get

    def rotated(store, path, options=None):
        bucket.delete_object(Bucket="runs", Key="of/snow/checkpoints/step-000001.ckpt")
        return get(store, path, options=options)

    monkeypatch.setattr(obstore, "get", rotated)
    Mirror(URL, elsewhere).fetch(resumes=True)
    assert elsewhere.checkpoint.read_bytes() == mirror.run.checkpoint.read_bytes()
    assert not elsewhere.checkpoint_of(1).exists()


def test_a_damaged_note_costs_no_more_than_uploads(mirror, bucket, elsewhere):
    save(mirror.run, 2)
    mirror._upload()
    mirror.uploaded.path.write_text("{")
    again = Mirror(URL, mirror.run)
    again.fetch(resumes=True)
    again.start()
    again.finish()
    Mirror(URL, elsewhere).fetch(resumes=True)
    assert told(elsewhere) == told(mirror.run)


def test_a_mistake_in_the_settings_is_said_at_once(bucket, run, tiny, tmp_path):
    """The run is refused, and leaves no folder: there is nothing to be uploaded."""
    error = run("train", *short(tiny, tmp_path / "nowhere", URL, 1), ok=False).error
    assert error.startswith("error: data.root=")
    assert "is not all in" not in error
    assert not names(bucket)
    assert not (tmp_path / local_folder(URL)).exists()


def test_what_is_no_file_is_not_waited_for(mirror, bucket):
    os.mkfifo(mirror.run.path / "pipe")
    (mirror.run.path / "loop").symlink_to("loop")
    assert mirror._try() is None
    assert names(bucket) == {"config.yaml"}


def test_with_several_machines_the_bucket_has_all_before_the_others_are_met(mirror, bucket, monkeypatch):
    monkeypatch.setattr(module, "LOOK", 1000.0)
    save(mirror.run, 2)
    mirror.start(at_once=True)
    assert "checkpoints/last.ckpt" in names(bucket)
    mirror.finish()


def test_a_process_that_lightning_has_started_downloads_nothing(mirror, bucket, tmp_path, monkeypatch):
    """It comes when the first one of its machine, which has started it, is at work in the folder."""
    save(mirror.run, 2)
    mirror._upload()
    for rank, downloads in (("1", False), ("0", True)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with module.mirrored(URL, tmp_path / "machine", resumes=True):
            assert (tmp_path / "machine" / "config.yaml").exists() == downloads
