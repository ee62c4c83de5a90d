"""Transfers that break off, and what goes on."""

import itertools
import threading
from pathlib import Path

import pytest

from datamodules.errors import UserError
from datamodules.shards import remote, transfer
from datamodules.shards.remote import find_shards
from datamodules.shards.stream import read_items
from tests.support.shard_server import Handler, serve, upload
from tests.support.shards import ALL, braces


def test_transfer_that_breaks_off_is_taken_up_again(cache, server, capfd):
    from tasks.terminal import configure_logging

    configure_logging()
    shards, _ = find_shards(server)
    name = shards[0].url.rpartition("/")[2]
    size = (cache.folder / name).stat().st_size
    Handler.breaks[name] = [size // 2]
    read = [item.key for shard in shards for _, item in read_items(shard, empty_prompt=False)]
    assert sorted(read) == sorted(ALL), "nothing twice, nothing left out"
    assert Handler.served[name] == [None, f"bytes={size // 2}-", None], "again from the start, without ranges"
    assert "attempt 2 of 5" in capfd.readouterr().err


def test_remote_that_stays_broken_is_one_line(cache, server):
    shards, _ = find_shards(server)
    Handler.breaks[shards[0].url.rpartition("/")[2]] = [2000] * 99
    with pytest.raises(UserError, match=r"cannot be read: .*\(5 attempts\)"):
        list(read_items(shards[0], empty_prompt=False))


def test_shard_that_is_shorter_than_its_manifest_says_is_never_passed_over(cache, monkeypatch):
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    whole = shards[0]
    for size in (10_240, 3_584, 700):  # between members and inside of them; `cat` itself ends well
        cut = whole._replace(url=f"pipe:head -c {size} {whole.url.removeprefix('pipe:cat ')}")
        with pytest.raises(UserError, match="cannot be read"):
            list(read_items(cut, empty_prompt=False))


def test_leaving_a_pipe_early_says_nothing(cache, capfd):
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    slow = shards[0]._replace(url=f"{shards[0].url}; sleep 0.1; cat {cache.folder}/*.tar; exit 3")
    groups = remote.read_groups(slow)
    next(groups)
    groups.close()
    assert capfd.readouterr().err == ""


def reads(url):
    with transfer.open_url(url, known=True, stopped=threading.Event()) as stream:
        return stream.read()


@pytest.mark.parametrize("ranges", [True, False])
def test_bytes_are_the_same_wherever_a_transfer_breaks_off(cache, server, monkeypatch, ranges):
    monkeypatch.setattr(Handler, "ranges", ranges)
    tar = next(iter(cache.manifest()["shards"]))
    data = (cache.folder / tar).read_bytes()
    places = [0, 1, 511, 512, 5000, len(data) // 2, len(data) - 1]
    Handler.breaks[tar] = list(places if ranges else itertools.chain.from_iterable((p, p) for p in places))[1:]
    assert reads(f"{server}/{tar}") == data
    assert not Handler.breaks[tar]
    if ranges:
        asked = [0 if asked is None else int(asked[6:-1]) for asked in Handler.served[tar]]
        assert asked == [0, *places[1:]], "nothing is sent twice"


def test_s3_gives_the_same_bytes_wherever_it_breaks_off(cache, server, s3, monkeypatch):
    upload(cache.folder)
    monkeypatch.setattr(Handler, "upstream", s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    tar = next(iter(cache.manifest()["shards"]))
    Handler.breaks[tar] = [3, 700, 10_000]
    assert reads(f"s3://bucket/folder/{tar}") == (cache.folder / tar).read_bytes()
    assert Handler.served[tar] == [None, "bytes=3-", "bytes=700-", "bytes=10000-"]
    Handler.breaks[tar] = [3, 700, 10_000]
    shards, _ = find_shards("s3://bucket/folder")
    assert sorted(item.key for shard in shards for _, item in read_items(shard, empty_prompt=True)) == sorted(ALL)


def test_transfer_goes_on_when_its_server_comes_back(cache, server, monkeypatch):
    """At its third attempt."""
    monkeypatch.setattr(Handler, "ranges", True)
    tar = next(iter(cache.manifest()["shards"]))
    data = (cache.folder / tar).read_bytes()
    first = serve(cache.folder)
    port = first.server_address[1]
    Handler.breaks[tar] = [6000]
    started = []

    class Pauses(threading.Event):
        count = 0

        def wait(self, timeout=None):
            self.count += 1
            if self.count == 3:
                started.append(serve(cache.folder, port))
            return False

    with transfer.open_url(f"http://127.0.0.1:{port}/{tar}", known=True, stopped=Pauses()) as stream:
        raw = stream.raw
        read = raw.read(6000)
        first.shutdown()
        first.server_close()
        read += raw.readall()
    started[0].shutdown()
    started[0].server_close()
    assert read == data
    assert Handler.served[tar][-1] == f"bytes={len(read) - len(data) + 6000}-"


def test_file_that_changes_while_it_is_read_is_never_mixed(cache, server, monkeypatch):
    monkeypatch.setattr(Handler, "ranges", True)
    shards, _ = find_shards(server)
    first, second = (Path(cache.folder, shard.url.rpartition("/")[2]) for shard in shards[:2])
    Handler.breaks[first.name] = [12_000]  # behind the block that is read for the first group
    groups = remote.read_groups(shards[0])
    next(groups)
    first.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match=r"latents-00000-000000.tar changed while it was read: start again$"):
        list(groups)
