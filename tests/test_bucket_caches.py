"""data.cache_dir=s3://...: caches that machines without a common disk build and read."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import boto3
import obstore
import pytest

from datamodules.shards import leases, transfer
from datamodules.shards.bucket import Bucket
from datamodules.shards.bucket_cache import cache_of
from datamodules.shards.index import ShardIndex
from datamodules.shards.stores import local_folder
from tests.datamodules.shards.conftest import moto_server, s3  # noqa: F401
from tests.support.caches import cache_overrides, encoded, flip, only
from tests.support.commands import kill_when, lora_bytes, short, wait_until
from tests.support.hold import divide_and_hold
from tests.support.latents import content, fill
from tests.support.pictures import make_pairs

URL = "s3://caches/of/all"


@pytest.fixture
def bucket(s3, tmp_path, monkeypatch):  # noqa: F811
    """An empty bucket, and a machine that has nothing of it."""
    monkeypatch.setattr(transfer, "PAUSE", 0.01)
    monkeypatch.chdir(tmp_path)
    client = boto3.client("s3")
    client.create_bucket(Bucket="caches")
    yield client
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="caches"):
        for one in page.get("Contents", []):
            client.delete_object(Bucket="caches", Key=one["Key"])
    client.delete_bucket(Bucket="caches")


def names(bucket):
    """The names in the one cache of the bucket, without who did what of the build."""
    keys = [one["Key"] for one in bucket.list_objects_v2(Bucket="caches").get("Contents", [])]
    assert len({key.split("/")[2] for key in keys}) == 1
    return {key.split("/", 3)[3] for key in keys if "/building/" not in key}


def downloaded(bucket, folder):
    """A copy of the one cache, as a folder."""
    for one in bucket.list_objects_v2(Bucket="caches")["Contents"]:
        path = folder / Path(one["Key"]).relative_to("of/all")
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.download_file("caches", one["Key"], str(path))
    return only(folder)


def bucket_overrides(tiny, root, folder):
    return [*cache_overrides(tiny, root, folder / "cache"), f"data.cache_dir={URL}"]


def elsewhere(tmp_path, monkeypatch, name):
    """Another machine, which has nothing."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_what_one_machine_has_encoded_others_train_on(bucket, run, tiny, pairs, tmp_path, monkeypatch):
    run("train", *short(tiny, pairs, tmp_path / "local", 3), f"data.cache_dir={tmp_path / 'whole'}")
    assert encoded(run("predict", *bucket_overrides(tiny, pairs, tmp_path), "data.shard_size=20000")) == 8
    assert names(bucket) == {".used", "index.jsonl", "index.npz", "manifest.json"} | {
        name for name in names(bucket) if re.fullmatch(r"latents-\d+-\d+\.tar", name)
    }
    assert content(downloaded(bucket, tmp_path / "copy")) == content(only(tmp_path / "whole"))
    assert not list((tmp_path / "cache").rglob("*.tar")), "what is uploaded takes no space"

    elsewhere(tmp_path, monkeypatch, "another")
    settings = [*short(tiny, pairs, tmp_path / "remote", 3), f"data.cache_dir={URL}"]
    text = run("train", *settings).text
    assert encoded(run("train", *settings[:-1], f"data.cache_dir={URL}", f"output_dir={tmp_path / 'again'}")) == 0
    assert "loading text" not in text
    assert f"encoded in {URL}/" in text
    assert lora_bytes(tmp_path / "remote") == lora_bytes(tmp_path / "local")


def test_the_work_of_a_machine_that_is_lost_is_taken_up_by_another(bucket, run, start, tiny, tmp_path, monkeypatch):
    """Both here by processes of one machine, with disks of their own: `leases` tells machines by signs of life."""
    root = make_pairs(tmp_path / "pairs", [(32, 32), (48, 32)] * 10)
    run("predict", *cache_overrides(tiny, root, tmp_path / "whole"))
    command = bucket_overrides(tiny, root, tmp_path)
    held = {name: tmp_path / f"{name}-held" for name in ("lost", "other")}
    processes = {}
    for name, marker in held.items():
        folder = elsewhere(tmp_path, monkeypatch, name)
        hold = partial(divide_and_hold, 2, 5, marker)
        processes[name] = start("predict", *command, before=hold, cwd=folder)
        wait_until(marker.exists, processes[name])
    kill_when(held["lost"].exists, processes["lost"])
    shutil.rmtree(tmp_path / "lost")
    held["other"].with_suffix(".go").touch()
    text, _ = processes["other"].communicate(timeout=60)
    assert processes["other"].returncode == 0, text
    assert content(downloaded(bucket, tmp_path / "copy")) == content(only(tmp_path / "whole"))
    count = sum(len(held[name].with_suffix(".encoded").read_bytes()) for name in held)
    assert 20 <= count <= 22, "what was not uploaded of the lost machine's tar is encoded again"


@pytest.fixture
def filled(bucket, tmp_path):
    """A cache in the bucket that was made of samples, and its local copy."""
    cache = cache_of(URL, "0123456789abcdef", {"dtype": "bfloat16"})
    cache.seal(fill(cache, 10, full=10**9))
    cache.merge()
    return cache


def rows_read(cache, limit=10**9):
    index, tars = ShardIndex(cache.rows()), cache.readable_tars(limit)
    return [tars.open(index, row).read(1 << 20, 0) for row in range(len(index.spans) // 3)], tars


def test_rows_are_kept_up_to_a_limit_and_compared_with_their_checksums(filled, monkeypatch, tmp_path):
    fetched, get_range = [], obstore.get_range

    def counted(*args, **more):
        fetched.append(more)
        return get_range(*args, **more)

    monkeypatch.setattr(obstore, "get_range", counted)
    first, tars = rows_read(filled)
    count = len(first)
    assert len(fetched) == count
    assert rows_read(filled)[0] == first
    assert len(fetched) == count, "from this machine's disk"
    for key in list(tars._kept):
        tars._kept[key] = b"damaged"
    assert rows_read(filled)[0] == first
    assert len(fetched) == 2 * count
    assert rows_read(filled, limit=1)[0] == first
    assert tars._kept.volume() < 10**6


def test_rows_are_read_where_none_can_be_kept(filled, caplog):
    right = rows_read(filled)[0]
    read = filled.folder.parent / "read"
    shutil.rmtree(read)  # with its write-ahead log, on which it depends what SQLite says
    read.mkdir()
    (read / "cache.db").write_bytes(b"damaged" * 1000)
    assert rows_read(filled)[0] == right
    assert [record.getMessage() for record in caplog.records if record.name == "retouch"] == [
        f"note: {read}: file is not a database; what is read of {filled.bucket} is not kept"
    ]


def test_a_bucket_that_lies_is_asked_again_and_then_named(filled, monkeypatch):
    right, get_range, lies = rows_read(filled)[0], obstore.get_range, []
    shutil.rmtree(filled.folder.parent / "read")

    def lying(*args, start, length):
        lies.append(start)
        return get_range(*args, start=start + len(lies) % 2, length=length)

    monkeypatch.setattr(obstore, "get_range", lying)
    assert rows_read(filled)[0] == right
    monkeypatch.setattr(obstore, "get_range", lambda *args, start, length: b"x" * length)
    shutil.rmtree(filled.folder.parent / "read")
    with pytest.raises(Exception, match=r"data.cache_dir: s3://caches/of/all/\w+ .*tar is not as it was written"):
        rows_read(filled)


def test_what_is_lost_of_a_bucket_is_found_again(bucket, filled, tmp_path):
    """A tar, the index, or the manifest; and rows that were uploaded by a build that was killed."""
    whole = content(downloaded(bucket, tmp_path / "copy"))
    prefix = f"of/all/{filled.folder.name}"
    for lost in ("manifest.json", "index.jsonl"):
        bucket.delete_object(Bucket="caches", Key=f"{prefix}/{lost}")
        filled.recover()
        filled.merge()
        shutil.rmtree(tmp_path / "copy")
        assert content(downloaded(bucket, tmp_path / "copy")) == whole, lost
    (tar,) = filled.manifest()["shards"]
    bucket.delete_object(Bucket="caches", Key=f"{prefix}/{tar}")
    filled.recover()
    assert filled.sample_ids() == set()


@pytest.fixture
def tars_moved(monkeypatch):
    """The names of those that are uploaded or downloaded."""
    moved = []
    for name in ("write", "download"):
        work = getattr(Bucket, name)

        def noted(self, name, *args, work=work):
            if name.endswith(".tar"):
                moved.append(name)
            return work(self, name, *args)

        monkeypatch.setattr(Bucket, name, noted)
    return moved


def test_a_damaged_copy_of_the_index_is_downloaded_again(bucket, filled, tmp_path, tars_moved):
    """And the bucket's is as it was: of a large cache all tars would be downloaded and uploaded again."""
    whole = content(downloaded(bucket, tmp_path / "copy"))
    flip(filled.folder / "index.jsonl", 0.5)
    filled.recover()
    filled.merge()
    assert not tars_moved
    shutil.rmtree(tmp_path / "copy")
    assert content(downloaded(bucket, tmp_path / "copy")) == whole


def test_a_build_killed_between_the_uploads_of_index_and_manifest_moves_no_tar(
    bucket, filled, tmp_path, monkeypatch, tars_moved
):
    write = Bucket.write

    def killed(self, name, *args):
        if name == "manifest.json":
            raise KeyboardInterrupt
        write(self, name, *args)

    filled.seal(fill(filled, 4, rank=1, full=10**9, first=10))
    tars_moved.clear()
    with monkeypatch.context() as context:
        context.setattr(Bucket, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            filled.merge()
    elsewhere(tmp_path, monkeypatch, "another")
    for cache in (cache_of(URL, filled.folder.name, filled.parts), filled):
        cache.recover()
        cache.merge()
        assert cache.sample_ids() == {f"id{number}" for number in range(14)}
    assert not tars_moved
    assert len(downloaded(bucket, tmp_path / "copy").sample_ids()) == 14


def test_another_command_of_the_machine_reverts_no_merge(bucket, filled, tmp_path, monkeypatch):
    """It looks at the bucket while the new index is being uploaded."""
    filled.seal(fill(filled, 4, rank=1, full=10**9, first=10))
    write = Bucket.write

    def looked_at(self, name, *args):
        cache_of(URL, filled.folder.name, filled.parts).refresh()
        write(self, name, *args)
        cache_of(URL, filled.folder.name, filled.parts).refresh()

    with monkeypatch.context() as context:
        context.setattr(Bucket, "write", looked_at)
        filled.merge()
    assert len(downloaded(bucket, tmp_path / "copy").sample_ids()) == 14
    assert len(filled.sample_ids()) == 14
    assert not filled.unmerged()


def test_a_tar_without_a_sample_is_not_uploaded(bucket, filled):
    """As a process leaves that is killed as soon as it has opened one."""
    before = names(bucket)
    filled.open_shard(3, 10**9)._file.close()
    filled.recover_units({3: False})
    assert names(bucket) == before
    assert not list(filled.folder.glob("*.tar"))


def test_a_name_that_is_not_found_once_is_asked_for_again(filled, monkeypatch):
    """The bucket's server was reached before: its name is right."""
    from obstore.exceptions import GenericError

    bucket, listing, failures = filled.bucket, obstore.list_with_delimiter, []

    def unknown(*args):
        if not failures:
            failures.append(1)
            raise GenericError("Generic S3 error: dns error: failed to lookup address information")
        return listing(*args)

    monkeypatch.setattr(obstore, "list_with_delimiter", unknown)
    assert bucket.names()
    assert failures


def test_what_a_killed_process_has_written_and_not_uploaded_counts_when_it_is(bucket, filled, tmp_path, monkeypatch):
    """Of a unit that its own machine takes again: all its samples are there, and no tar is opened any more."""
    shard = fill(filled, 2, rank=1, full=10**9, first=10)
    shard._file.close()
    assert len(filled.sample_ids()) == 10
    filled.recover_units({1: False})
    assert len(filled.sample_ids()) == 12
    elsewhere(tmp_path, monkeypatch, "another")
    other = cache_of(URL, filled.folder.name, filled.parts)
    other.recover()
    other.merge()
    assert other.sample_ids() == {f"id{number}" for number in range(12)}


def test_units_are_taken_without_asking_the_bucket_for_each(filled, monkeypatch):
    asked, names = [], Bucket.names
    monkeypatch.setattr(Bucket, "names", lambda self, deep=False: asked.append(1) or names(self, deep))
    filled.recover_units(dict.fromkeys(range(500), False))
    assert len(asked) == 1


def test_clean_leaves_what_is_being_filled_and_names_what_is_not_uploaded(bucket, run, tiny, pairs, tmp_path):
    overrides = bucket_overrides(tiny, pairs, tmp_path)
    run("predict", *overrides)
    (used,) = (note.parent for note in local_folder(URL, "cache").glob("*/.used"))
    old = cache_of(URL, "0" * len(used.name), {})
    assert old.touch()
    fill(old, 2)._file.close()
    clean = ["task=clean", *overrides[1:], "delete=true"]
    with old.leases().working(lambda: None):
        assert f"{old.folder} is being filled: it stays" in run("predict", *clean).text
    text = run("predict", *clean[:-1]).text
    assert f"{old.folder}  " in text
    assert "never finished, 1 shard of it not uploaded" in text
    assert "freed" in run("predict", *clean).text
    assert not old.folder.exists()
    assert used.exists()


def test_a_bucket_that_may_only_be_read_is_read(bucket, run, tiny, pairs, tmp_path, monkeypatch):
    run("predict", *bucket_overrides(tiny, pairs, tmp_path))
    elsewhere(tmp_path, monkeypatch, "another")
    monkeypatch.setattr(Bucket, "may_write", lambda *args: False)
    for name in ("write", "create", "remove"):
        monkeypatch.setattr(Bucket, name, partial(pytest.fail, f"{name} was called"))
    text = run("train", *short(tiny, pairs, tmp_path / "run", 2), f"data.cache_dir={URL}").text
    assert f"encoded in {URL}/" in text
    more = make_pairs(tmp_path / "more", [(64, 32)])
    error = run("train", *short(tiny, more, tmp_path / "more_run", 2), f"data.cache_dir={URL}", ok=False).error
    assert re.search(r"00 not in the cache s3://caches/of/all/\w+: fill it from where it can be written", error)


def test_leases_in_a_bucket_are_taken_once(bucket, monkeypatch):
    done = []

    def work():
        mine = leases.Leases(Bucket(URL, "data.cache_dir").inner("building"))
        with mine.working(lambda: None):
            while open := mine.open(["a", "b", "c", "d"]):
                for name in mine.take(open, 1):
                    done.append(name)
                    mine.finish(name)
        mine.close()

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work) for _ in range(4)]:
            each.result()
    left = [one["Key"] for one in bucket.list_objects_v2(Bucket="caches")["Contents"]]
    assert len(done) == 4 * len({key.split("/")[-2] for key in left})
    assert {key.split("/")[-1] for key in left} == {"closed"}


def test_a_url_that_is_no_bucket_is_refused(run, tiny, pairs, tmp_path):
    settings = [*short(tiny, pairs, tmp_path / "run", 1), "data.cache_dir=https://host/folder"]
    line = "data.cache_dir=https://host/folder: name a folder, or one in s3://, gs:// or az://"
    assert line in run("train", *settings, ok=False).error
