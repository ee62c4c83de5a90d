"""data.cache_dir=s3://...: caches that are built in a bucket and streamed from there."""

import os
import re
import socket
from functools import partial
from pathlib import Path

import pytest

from datamodules.shards.cache import open_cache
from datamodules.shards.reader import open_shards
from datamodules.shards.transfer import Bucket
from tests.support.caches import cache_overrides, encoded, only
from tests.support.commands import short
from tests.support.latents import content, fill
from tests.support.pictures import make_pairs
from tests.support.several_runs import as_rank

URL = "s3://own/of/all"


def names(bucket):
    """The names in the one cache of the bucket."""
    keys = [one.key for one in bucket.objects.all()]
    assert len({key.split("/")[2] for key in keys}) <= 1
    return {key.split("/", 3)[3] for key in keys}


def downloaded(bucket, folder):
    """A copy of the one cache, as a folder."""
    for one in bucket.objects.all():
        path = folder / Path(one.key).relative_to("of/all")
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.download_file(one.key, str(path))
    return only(folder)


def bucket_overrides(tiny, root, folder):
    return [*cache_overrides(tiny, root, folder / "cache"), f"data.cache_dir={URL}"]


def elsewhere(tmp_path, monkeypatch, name):
    """Another machine, which has nothing."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_cache_built_in_a_bucket_equals_the_local_one_and_trains_there(bucket, run, tiny, pairs, tmp_path, monkeypatch):
    run("predict", *cache_overrides(tiny, pairs, tmp_path / "whole"))
    monkeypatch.setattr("callbacks.shard_writer.SHARD_SIZE", 20_000)
    outcome = run("predict", *bucket_overrides(tiny, pairs, tmp_path))
    assert encoded(outcome) == 8
    tars = {name for name in names(bucket) if re.fullmatch(r"latents-\d+-\d+\.tar", name)}
    assert len(tars) > 1
    assert names(bucket) == {"manifest.json"} | tars | {f"{name[:-4]}.jsonl" for name in tars}
    assert content(downloaded(bucket, tmp_path / "copy")) == content(only(tmp_path / "whole"))
    assert not list((tmp_path / "cache").rglob("*.tar")), "an uploaded tar takes no space"

    name = only(tmp_path / "whole").folder.name
    assert re.search(rf"train on it: python train.py 'model\.\S+' data.shards={URL}/{name}\n", outcome.text)
    settings = short(tiny, "null", tmp_path / "run", 1)
    text = run("train", *settings, f"data.shards={URL}/FINGERPRINT").text
    assert f"8 pairs of {URL}/{name}" in text


def test_only_task_cache_accepts_a_cache_in_a_bucket(bucket, run, tiny, pairs, tmp_path):
    settings = [*short(tiny, pairs, tmp_path / "run", 1), f"data.cache_dir={URL}"]
    error = run("train", *settings, ok=False).error
    assert f"data.cache_dir={URL}: only predict.py task=cache fills a cache in a bucket. Train on it with " in error
    assert f"data.shards={URL}/FINGERPRINT instead of" in error
    clean = ["task=clean", *bucket_overrides(tiny, pairs, tmp_path)[1:]]
    assert f"data.cache_dir={URL}: task=clean deletes folders of this machine" in run("predict", *clean, ok=False).error
    assert not names(bucket)
    elsewhere = [*short(tiny, pairs, tmp_path / "run", 1), "data.cache_dir=https://host/folder"]
    assert ": name a folder, or one in s3://, gs:// or az://" in run("train", *elsewhere, ok=False).error


def as_machine(rank, port):
    """Make this process the only one of its machine."""
    as_rank(rank, port)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}


@pytest.mark.slow
def test_machines_without_a_common_disk_build_one_cache(bucket, run, start, tiny, tmp_path, monkeypatch):
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32)] * 4)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folders = [elsewhere(tmp_path, monkeypatch, name) for name in ("first", "second")]
    processes = [
        start("predict", *bucket_overrides(tiny, root, tmp_path), before=partial(as_machine, rank, port), cwd=folder)
        for rank, folder in enumerate(folders)
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert ["encoded 8 samples" in text for text in texts] == [True, False]
    copy = downloaded(bucket, tmp_path / "copy")
    assert content(copy) == content(only(tmp_path / "whole"))
    assert [facts["samples"] for facts in copy.manifest()["shards"].values()] == [4, 4]


def new_cache():
    return open_cache(URL, {"dtype": "bfloat16"})


def build(cache, count, first=0):
    """Do the work of a build."""
    cache.recover()
    cache.seal(fill(cache, count, full=10**9, first=first))
    cache.merge()
    return cache


def streamed():
    """The ids that a reader of the bucket finds."""
    cache = new_cache()
    samples = open_shards(Bucket(str(cache), "data.shards"), cache.parts)
    return {sample.key.replace("sample ", "id") for sample in samples}


def ids(*numbers):
    return {f"id{number}" for number in numbers}


@pytest.mark.parametrize("written", range(3))
def test_an_interrupted_upload_never_leaves_a_cache_that_looks_complete(bucket, monkeypatch, written):
    """Before the tar, its part of the index, or the manifest; earlier samples stay readable."""
    build(new_cache(), 4)
    write, left = Bucket.write, [None] * written

    def killed(self, name, path):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        write(self, name, path)

    with monkeypatch.context() as context:
        context.setattr(Bucket, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            build(new_cache(), 3, first=4)
    assert streamed() == ids(*range(4))
    cache = new_cache()
    cache.recover()
    cache.merge()
    assert cache.sample_ids() == streamed() == ids(*range(7))
    assert not list(cache.folder.glob("latents-*"))


def test_another_machine_encodes_only_the_samples_that_a_bucket_lacks(bucket, tmp_path, monkeypatch):
    cache = build(build(new_cache(), 4), 3, first=4)
    whole = content(downloaded(bucket, tmp_path / "copy"))
    (tar,) = {row["shard"] for row in cache.rows() if row["id"] == "id5"}
    bucket.Object(f"of/all/{cache.folder.name}/{tar}").delete()
    bucket.Object(f"of/all/{cache.folder.name}/manifest.json").delete()
    elsewhere(tmp_path, monkeypatch, "other")
    assert new_cache().sample_ids() == ids(*range(4))
    build(new_cache(), 3, first=4)
    assert streamed() == ids(*range(7))
    copy = downloaded(bucket, tmp_path / "again")
    copy.recover()
    assert content(copy) == whole


def test_a_tar_whose_samples_another_machine_has_uploaded_is_not_uploaded(bucket, tmp_path, monkeypatch):
    """Otherwise they would be trained on twice."""
    left = new_cache()
    fill(left, 3)._file.close()
    elsewhere(tmp_path, monkeypatch, "other")
    build(new_cache(), 4)
    monkeypatch.chdir(tmp_path)
    left.recover()
    assert len([row for row in left.rows() if "key" in row]) == 4
    assert not list(left.folder.glob("latents-*"))
