"""output_dir=s3://...: runs that are resumed on a machine that has nothing of them."""

import shutil
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
        mirror.start()
        with pytest.raises(UserError, match=r"run is not all in s3://runs/of/snow: reset; the same command uploads it"):
            mirror.finish(0.2)
    said = f"note: {URL}: reset; the run goes on, and is uploaded when that is over\n"
    assert capfd.readouterr().err == said, "once"
    assert mirror._try() is None
    assert capfd.readouterr().err == f"{URL} has all of the run again\n"
    assert names(bucket) == {"config.yaml"}


def test_a_checkpoint_comes_after_what_belongs_to_it(mirror, bucket, monkeypatch):
    import obstore

    checkpoints = mirror.run.checkpoint.parent
    checkpoints.mkdir()
    for name in ("last.ckpt", "step-000002.ckpt"):
        (checkpoints / name).write_text(name)
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
    assert order[2:] == ["last.ckpt"]


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
