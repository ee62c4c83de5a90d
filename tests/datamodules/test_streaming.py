"""Shards over HTTP, S3 and pipes, from real servers on the loopback address."""

import functools
import http.server
import itertools
import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from datamodules import remote
from datamodules.errors import UserError
from datamodules.remote import find_shards
from datamodules.sampler import samples_per_batch
from datamodules.streaming import Item, ShardStream, StreamLoader, read_items
from tests.datamodules.test_shards import cache, tensors  # noqa: F401  a fixture


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; `faults[name]` counts the requests that break off after half of the file, `status` refuses."""

    faults: Counter = Counter()
    served: Counter = Counter()
    status: dict = {}

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.served[name] += 1
        if name in self.status:
            self.send_error(self.status[name])
            return
        if self.faults[name] > 0:
            self.faults[name] -= 1
            data = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.close()
            return
        super().do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    Handler.faults.clear()
    Handler.served.clear()
    Handler.status.clear()
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(cache.folder)))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    moto = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "testing"
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    yield os.environ["AWS_ENDPOINT_URL"]
    server.stop()
    for name in ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del os.environ[name]


def upload(folder):
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for path in folder.iterdir():
        client.upload_file(str(path), "bucket", f"folder/{path.name}")


def stream(shards, limit=1, shuffle=0, rank=0, world=1, start=0):
    return ShardStream(shards, lambda tokens: limit, shuffle, 7, rank, world, start, empty_prompt=True)


def keys(batches):
    return [key for batch in batches for key in batch.keys]


ALL = {f"sample {n}" for n in range(10)}


def braces(cache):  # noqa: F811
    count = len(cache.manifest()["shards"])
    assert count > 2
    return f"latents-00000-{{000000..{count - 1:06d}}}.tar"


def test_folder_and_pattern_over_http_give_every_sample(cache, server):  # noqa: F811
    for pattern in (server, f"{server}/", f"{server}/{braces(cache)}"):
        shards, manifest = find_shards(pattern)
        assert manifest["fingerprint"] == cache.folder.name
        items = {item.key: item for shard in shards for _, item in read_items(shard, empty_prompt=True)}
        assert items.keys() == ALL
        for number in range(10):
            read = items[f"sample {number}"]
            assert all(torch.equal(read.tensors[name], value) for name, value in tensors(number).items())
            assert torch.equal(read.prompt["prompt_embeds"], torch.full((3, 5), float(number % 2)))
            assert torch.equal(read.empty_prompt["prompt_embeds"], torch.full((3, 5), 9.0))


def test_s3_gives_every_sample(cache, s3):  # noqa: F811
    upload(cache.folder)
    for pattern in ("s3://bucket/folder", f"s3://bucket/folder/{braces(cache)}"):
        shards, _ = find_shards(pattern)
        assert set(keys(itertools.islice(stream(shards), 10))) == ALL
    with pytest.raises(UserError, match=r"s3://bucket/nowhere/manifest.json is not there"):
        find_shards("s3://bucket/nowhere")


def test_pipe_gives_every_sample(cache):  # noqa: F811
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    assert set(keys(itertools.islice(stream(shards), 10))) == ALL


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 1), (2, 2), (3, 3)])
def test_every_sample_is_seen_equally_often_by_all_processes_together(cache, server, world, workers):  # noqa: F811
    """With fewer shards than workers too, and by nobody twice before all have been seen about once."""
    shards, _ = find_shards(server)
    seen = Counter()
    epochs = world * workers * 2
    for rank in range(world):
        for worker in range(workers):
            one = stream(shards, rank=rank, world=world)
            for epoch in range(epochs):
                order = one.order(epoch)[(rank * workers + worker + epoch) % (world * workers) :: world * workers]
                seen.update(item.key for shard in order for _, item in read_items(shard, empty_prompt=False))
    assert seen == dict.fromkeys(ALL, epochs)


def test_workers_and_shuffling_lose_nothing(cache, server):  # noqa: F811
    shards, _ = find_shards(server)
    loader = StreamLoader(stream(shards, shuffle=4), num_workers=2, stride=1)
    batches = list(itertools.islice(loader, 60))
    assert set(keys(batches)) == ALL
    assert [draw for batch in batches for draw in batch.draws] == list(range(60))
    order = keys(itertools.islice(stream(shards, shuffle=4), 10))
    assert order != sorted(order)


def test_batches_hold_one_size_and_numbers_that_no_other_sample_has(cache, server):  # noqa: F811
    shards, _ = find_shards(server)
    drawn = []
    for rank in range(2):
        loader = StreamLoader(stream(shards, limit=2, rank=rank, world=2, start=5), num_workers=0, stride=2)
        for batch in itertools.islice(loader, 8):
            assert len({control.shape for control in batch.controls}) == 1
            assert batch.target_mean.shape[0] == 2
            drawn += batch.draws
    assert len(drawn) == len(set(drawn)) == 32
    assert min(drawn) == 20


def test_transfer_that_breaks_off_is_taken_up_again(cache, server, capfd):  # noqa: F811
    from callbacks.console import configure_logging

    configure_logging()
    shards, _ = find_shards(server)
    name = shards[0].url.rpartition("/")[2]
    Handler.faults[name] = 2
    read = [item.key for shard in shards for _, item in read_items(shard, empty_prompt=False)]
    assert sorted(read) == sorted(ALL), "nothing twice, nothing left out"
    assert Handler.served[name] == 3
    assert "attempt 2 of 5" in capfd.readouterr().err


def test_remote_that_stays_broken_is_one_line(cache, server):  # noqa: F811
    shards, _ = find_shards(server)
    Handler.faults[shards[0].url.rpartition("/")[2]] = 99
    with pytest.raises(UserError, match=r"cannot be read: .*\(5 attempts\)"):
        list(read_items(shards[0], empty_prompt=False))


def test_shard_that_is_shorter_than_its_manifest_says_is_never_passed_over(cache):  # noqa: F811
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    whole = shards[0]
    for size in (10_240, 3_584, 700):  # between members and inside of them; `cat` itself ends well
        cut = whole._replace(url=f"pipe:head -c {size} {whole.url.removeprefix('pipe:cat ')}")
        remote.PAUSE, pause = 0.0, remote.PAUSE
        try:
            with pytest.raises(UserError, match="cannot be read"):
                list(read_items(cut, empty_prompt=False))
        finally:
            remote.PAUSE = pause


def test_damaged_sample_is_never_trained_on(cache, server):  # noqa: F811
    shards, _ = find_shards(server)
    row = next(row for row in cache.rows() if "key" in row)
    path = cache.folder / row["shard"]
    data = bytearray(path.read_bytes())
    data[row["offset"] + row["bytes"] - 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{row['id']} is damaged"):
        list(read_items(shards[0], empty_prompt=False))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("{server}/nowhere", "nowhere/manifest.json is not there"),
        ("{server}/latents-00007-000000.tar", "manifest.json knows no latents-00007-000000.tar"),
        ("pipe:cat {folder}/latents.tgz", "names no .tar"),
        ("gopher://host/folder", "cannot open gopher://host/folder/manifest.json"),
        ("http://127.0.0.1:9/folder", "cannot be read"),
    ],
)
def test_url_that_cannot_be_used(cache, server, pattern, words):  # noqa: F811
    with pytest.raises(UserError, match=words):
        find_shards(pattern.format(server=server, folder=cache.folder))


def test_manifest_without_samples(cache, server):  # noqa: F811
    for tar in cache.folder.glob("*.tar"):
        tar.unlink()
    cache.recover()
    with pytest.raises(UserError, match="no samples"):
        find_shards(server)


def test_leaving_a_pipe_early_says_nothing(cache, capfd):  # noqa: F811
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    slow = shards[0]._replace(url=f"{shards[0].url}; sleep 0.1; cat {cache.folder}/*.tar; exit 3")
    groups = remote.read_groups(slow)
    next(groups)
    groups.close()
    assert capfd.readouterr().err == ""


def test_rare_size_does_not_wait_for_copies_of_itself(cache, server):  # noqa: F811
    shards, _ = find_shards(server)
    batches = list(itertools.islice(stream(shards, limit=16), 12))
    assert all(len(batch.keys) == len(set(batch.keys)) for batch in batches)
    assert Counter(keys(batches)) == dict.fromkeys(ALL, 6)


def test_batch_padded_to_its_longest_prompt_keeps_within_the_budget():
    """900 tokens and nine times 100 are 10 x 900 once they are padded, not 1800."""
    lengths = [900, 100, 100, 400, 300, 100, 300, 100, 100, 100, 100, 100, 100, 1100, 50]
    stream = ShardStream([], partial(samples_per_batch, 1, 1000), 0, 7, 0, 1, 0, empty_prompt=False)
    items = [
        Item(str(number), {"target_mean": torch.zeros(1, 2, 2)}, {"prompt_embeds": torch.ones(length, 1)}, {}, "")
        for number, length in enumerate(lengths)
    ]
    rows = [{"tokens": length, "sizes": [[16, 16]], "mask": False} for length in lengths]
    stream._samples = lambda place, places: zip(rows, items, strict=True)
    shapes = [tuple(batch.prompt["prompt_embeds"].shape[:2]) for batch in stream]
    assert all(count == 1 or count * longest <= 1000 for count, longest in shapes)
    assert shapes == [(1, 900), (2, 100), (2, 400), (3, 300), (5, 100), (1, 1100)]


def test_page_that_is_no_manifest(cache, server):  # noqa: F811
    (cache.folder / "manifest.json").write_text("<html>sign in</html>")
    with pytest.raises(UserError, match="is no manifest of a cache"):
        find_shards(server)


def test_shard_that_vanishes_is_one_line(cache, server):  # noqa: F811
    shards, _ = find_shards(server)
    (cache.folder / shards[0].url.rpartition("/")[2]).unlink()
    with pytest.raises(UserError, match=r"latents-00000-000000.tar is not there"):
        list(read_items(shards[0], empty_prompt=False))


@pytest.mark.parametrize(("status", "words"), [(403, "may not be read"), (503, "cannot be read: 503")])
def test_refusal_is_one_line(cache, server, status, words):  # noqa: F811
    Handler.status["manifest.json"] = status
    with pytest.raises(UserError, match=words):
        find_shards(server)
