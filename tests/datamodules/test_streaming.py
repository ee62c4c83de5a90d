"""Shards over HTTP, S3 and pipes, from real servers on the loopback address."""

import functools
import http.server
import itertools
import os
import threading
import traceback
import urllib.error
import urllib.request
import zlib
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from datamodules.errors import UserError
from datamodules.sampler import samples_per_batch
from datamodules.shards import remote, stores, transfer
from datamodules.shards.remote import find_shards
from datamodules.streamed import Item, ShardStream, StreamLoader, read_items
from tests.datamodules.test_shards import cache, tensors  # noqa: F401  a fixture


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a folder, or what `upstream` does, and has faults.

    Attributes:
        breaks: by name, the bytes of the file after which each next response breaks off.
        replies: by name, the status, headers and body that are sent instead.
        ranges: whether ranges are known.
        served: by name, what ranges were asked for.
    """

    protocol_version = "HTTP/1.1"
    breaks: ClassVar[dict[str, list[int]]] = {}
    replies: ClassVar[dict[str, tuple]] = {}
    served: ClassVar[dict[str, list[str | None]]] = defaultdict(list)
    headers_seen: ClassVar[list] = []
    ranges = False
    upstream = ""

    def __init__(self, *args, directory):
        self.directory = directory
        super().__init__(*args)

    def do_GET(self):
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.served[name].append(self.headers["Range"])
        self.headers_seen.append(self.headers)
        status, headers, data, start = 200, {}, b"", 0
        if name in self.replies:
            status, headers, data = self.replies[name]
        elif self.upstream:
            status, headers, data, start = self.forward()
        elif not (path := Path(self.directory + self.path.partition("?")[0])).is_file():
            status = 404
        else:
            data = path.read_bytes()
            headers["ETag"] = f'"{zlib.crc32(data)}"'
            if self.ranges and self.headers["Range"]:
                start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                status, data = 206, data[start:]
        self.send_response(status)
        for key, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        places = self.breaks.get(name)
        self.wfile.write(data[: max(0, places[0] - start)] if places else data)
        if places:
            places.pop(0)
            self.wfile.flush()
            self.close_connection = True

    do_PUT = do_GET  # where S3 asks for credentials

    def forward(self):
        request = urllib.request.Request(self.upstream + self.path, headers=dict(self.headers))
        try:
            with urllib.request.urlopen(request) as reply:
                kept = {
                    key: reply.headers[key] for key in ("ETag", "Content-Range", "Last-Modified") if reply.headers[key]
                }
                start = int(kept.get("Content-Range", "bytes 0-").split()[1].partition("-")[0])
                return reply.status, kept, reply.read(), start
        except urllib.error.HTTPError as error:
            return error.code, {}, error.read(), 0

    def log_message(self, *args):
        pass


def serve(folder, port=0):
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(folder)))
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    return httpd


@pytest.fixture
def server(cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(transfer, "PAUSE", 0.01)
    for facts in (Handler.breaks, Handler.replies, Handler.served, Handler.headers_seen):
        facts.clear()
    monkeypatch.setattr(Handler, "ranges", False)
    httpd = serve(cache.folder)
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture(scope="module")
def moto_server():
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(moto_server, tmp_path, monkeypatch):
    """An S3 server, and nothing else of AWS in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secretsecretsecret",
        "AWS_ENDPOINT_URL": moto_server,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    stores._bucket.cache_clear()
    yield moto_server
    stores._bucket.cache_clear()


def upload(folder):
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for path in folder.iterdir():
        client.upload_file(str(path), "bucket", f"folder/{path.name}")


def stream(shards, limit=1, shuffle=0, rank=0, world=1, start=0):
    return ShardStream(shards, lambda tokens: limit, shuffle, 7, rank, world, start, empty_prompt=True)


def batches(*args, **settings):
    return stream(*args, **settings).batches(0, 1, threading.Event())


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
        assert set(keys(itertools.islice(batches(shards), 10))) == ALL
    with pytest.raises(UserError, match=r"s3://bucket/nowhere/manifest.json is not there"):
        find_shards("s3://bucket/nowhere")


def test_pipe_gives_every_sample(cache):  # noqa: F811
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    assert set(keys(itertools.islice(batches(shards), 10))) == ALL


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
    read = list(itertools.islice(loader, 60))
    assert set(keys(read)) == ALL
    assert [draw for batch in read for draw in batch.draws] == list(range(60))
    order = keys(itertools.islice(batches(shards, shuffle=4), 10))
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


def test_remote_that_stays_broken_is_one_line(cache, server):  # noqa: F811
    shards, _ = find_shards(server)
    Handler.breaks[shards[0].url.rpartition("/")[2]] = [2000] * 99
    with pytest.raises(UserError, match=r"cannot be read: .*\(5 attempts\)"):
        list(read_items(shards[0], empty_prompt=False))


def test_shard_that_is_shorter_than_its_manifest_says_is_never_passed_over(cache, monkeypatch):  # noqa: F811
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    whole = shards[0]
    for size in (10_240, 3_584, 700):  # between members and inside of them; `cat` itself ends well
        cut = whole._replace(url=f"pipe:head -c {size} {whole.url.removeprefix('pipe:cat ')}")
        with pytest.raises(UserError, match="cannot be read"):
            list(read_items(cut, empty_prompt=False))


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
        ("{server}/manifest.json/folder", "is not there"),
        ("{folder}/manifest.json", "manifest.json/manifest.json cannot be read: Not a directory"),
        ("{folder}/nowhere", "nowhere/manifest.json is not there"),
        ("s3:///folder", "names no bucket"),
        (
            "gopher://user:hunter2@host/folder",
            r"cannot open gopher://\*\*\*@host/folder/manifest.json: no such protocol",
        ),
        ("https://127.0.0.1:{port}/folder", "cannot be read: no server of that protocol is there$"),
        ("http://nowhere.invalid/folder", "cannot be read: no such host$"),
        ("http://127.0.0.1:9/folder", "cannot be read"),
    ],
)
def test_url_that_cannot_be_used(cache, server, pattern, words):  # noqa: F811
    with pytest.raises(UserError, match=words):
        find_shards(pattern.format(server=server, folder=cache.folder, port=server.rpartition(":")[2]))


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
    read = list(itertools.islice(batches(shards, limit=16), 12))
    assert all(len(batch.keys) == len(set(batch.keys)) for batch in read)
    assert Counter(keys(read)) == dict.fromkeys(ALL, 6)


def test_batch_padded_to_its_longest_prompt_keeps_within_the_budget():
    """900 tokens and nine times 100 are 10 x 900 once they are padded, not 1800."""
    lengths = [900, 100, 100, 400, 300, 100, 300, 100, 100, 100, 100, 100, 100, 1100, 50]
    stream = ShardStream([], partial(samples_per_batch, 1, 1000), 0, 7, 0, 1, 0, empty_prompt=False)
    items = [
        Item(str(number), {"target_mean": torch.zeros(1, 2, 2)}, {"prompt_embeds": torch.ones(length, 1)}, {}, "")
        for number, length in enumerate(lengths)
    ]
    rows = [{"tokens": length, "sizes": [[16, 16]], "mask": False} for length in lengths]
    stream._samples = lambda place, places, stopped: zip(rows, items, strict=True)
    shapes = [tuple(batch.prompt["prompt_embeds"].shape[:2]) for batch in stream.batches(0, 1, threading.Event())]
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


@pytest.mark.parametrize(
    ("status", "words", "tries"),
    [
        (401, r"may not be read \(401 Unauthorized\)", 1),
        (403, r"may not be read \(403 Forbidden\)", 1),
        (404, "is not there", 1),
        (410, "cannot be read: 410 Gone", 1),
        (400, "cannot be read: 400 Bad Request", 1),
        (429, r"cannot be read: 429 Too Many Requests \(5 attempts\)", 5),
        (503, r"cannot be read: 503 Service Unavailable \(5 attempts\)", 5),
        (599, r"cannot be read: 599 \(5 attempts\)", 5),
    ],
)
def test_refusal_is_one_line_and_what_lasts_is_tried_once(cache, server, status, words, tries):  # noqa: F811
    Handler.replies["manifest.json"] = (status, {}, b"<html>a page</html>")
    with pytest.raises(UserError, match=rf"^data.shards: {server}/manifest.json {words}$"):
        find_shards(server)
    assert len(Handler.served["manifest.json"]) == tries


def reads(url):
    with transfer.open_url(url, known=True, stopped=threading.Event()) as stream:
        return stream.read()


@pytest.mark.parametrize("ranges", [True, False])
def test_bytes_are_the_same_wherever_a_transfer_breaks_off(cache, server, monkeypatch, ranges):  # noqa: F811
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


def test_s3_gives_the_same_bytes_wherever_it_breaks_off(cache, server, s3, monkeypatch):  # noqa: F811
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


def test_transfer_goes_on_when_its_server_comes_back(cache, server, monkeypatch):  # noqa: F811
    monkeypatch.setattr(transfer, "PAUSE", 0.1)
    monkeypatch.setattr(Handler, "ranges", True)
    tar = next(iter(cache.manifest()["shards"]))
    data = (cache.folder / tar).read_bytes()
    first = serve(cache.folder)
    port = first.server_address[1]
    Handler.breaks[tar] = [6000]
    with transfer.open_url(f"http://127.0.0.1:{port}/{tar}", known=True, stopped=threading.Event()) as stream:
        raw = stream.raw
        read = raw.read(6000)
        first.shutdown()
        first.server_close()
        later = threading.Timer(0.2, lambda: started.append(serve(cache.folder, port)))
        started = []
        later.start()
        read += raw.readall()
    later.join()
    started[0].shutdown()
    started[0].server_close()
    assert read == data
    assert Handler.served[tar][-1] == f"bytes={len(read) - len(data) + 6000}-"


def test_file_that_changes_while_it_is_read_is_never_mixed(cache, server, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Handler, "ranges", True)
    shards, _ = find_shards(server)
    first, second = (Path(cache.folder, shard.url.rpartition("/")[2]) for shard in shards[:2])
    Handler.breaks[first.name] = [12_000]  # behind the block that is read for the first group
    groups = remote.read_groups(shards[0])
    next(groups)
    first.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match=r"latents-00000-000000.tar changed while it was read: start again$"):
        list(groups)


def enforce_keys(s3, after):
    """Let moto ask for keys that are known, after so many requests."""
    plain = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(f"{s3}/moto-api/reset-auth", str(after).encode(), plain)).close()


def test_absent_bucket_and_wrong_keys_are_tried_once(cache, server, s3, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Handler, "upstream", s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    with pytest.raises(UserError, match=r"s3://nowhere/folder/manifest.json is not there: there is no bucket nowhere$"):
        find_shards("s3://nowhere/folder")
    enforce_keys(s3, after=0)
    try:
        with pytest.raises(UserError, match=r"may not be read \(403 InvalidAccessKeyId\): check AWS_ACCESS_"):
            find_shards("s3://bucket/folder")
    finally:
        enforce_keys(s3, after=10**9)
    assert len(Handler.served["manifest.json"]) == 2


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((301, {}, b""), "set AWS_REGION to its own"),
        ((400, {}, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>"), "to eu-west-1"),
        ((400, {}, b"<Error><Code>ExpiredToken</Code><Message>0123</Message>"), "cannot be read: 400 ExpiredToken"),
    ],
)
def test_bucket_of_another_region_is_one_line_at_once(server, s3, monkeypatch, reply, words):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    Handler.replies["manifest.json"] = reply
    with pytest.raises(UserError, match=rf"^data.shards: s3://bucket/folder/manifest.json .*{words}$"):
        find_shards("s3://bucket/folder")
    assert len(Handler.served["manifest.json"]) == 1


def test_no_credentials_is_one_line_at_once(server, s3, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server)
    with pytest.raises(UserError, match=r"s3://bucket/folder/manifest.json needs credentials: set AWS_ACCESS_KEY_ID "):
        find_shards("s3://bucket/folder")
    assert len(Handler.served["token"]) == 1


def test_profile_gives_what_the_environment_does_not(cache, server, s3, monkeypatch, tmp_path):  # noqa: F811
    upload(cache.folder)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        f"[default]\nregion = nowhere-1\n[profile mine]\nregion = eu-west-1\nendpoint_url = {server}\n"
        "[profile office]\nsso_session = office\n"
    )
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = AKIAOTHER\naws_secret_access_key = 0123\n")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.setattr(Handler, "upstream", s3)
    assert len(find_shards("s3://bucket/folder")[0]) > 2
    assert "Credential=AKIAOTHER/" in Handler.headers_seen[-1]["Authorization"]
    assert "/eu-west-1/s3/" in Handler.headers_seen[-1]["Authorization"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    assert stores.aws_settings() == {"region": "eu-west-1", "endpoint": server}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for name, words in (("office", "aws configure export-credentials --profile office"), ("none", "no")):
        monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(UserError, match=words):
            stores.aws_settings()
    (tmp_path / "credentials").write_text("aws_secret_access_key = 0123456789")
    with pytest.raises(UserError, match=r"credentials cannot be read") as caught:
        stores.aws_settings()
    assert "0123456789" not in "".join(traceback.format_exception(caught.value))


def test_login_in_an_address_is_sent_to_its_host_alone(cache, server):  # noqa: F811
    other = serve(cache.folder)
    Handler.replies["manifest.json"] = (302, {"Location": f"http://127.0.0.1:{other.server_address[1]}/other"}, b"")
    with pytest.raises(UserError, match="is not there"):
        find_shards(server.replace("://", "://user:p%40ss@"))
    other.shutdown()
    other.server_close()
    assert [seen["Authorization"] for seen in Handler.headers_seen] == ["Basic dXNlcjpwQHNz", None]


@pytest.mark.parametrize("status", [None, 403, 404, 503, "broken", "html", "closed"])
def test_no_message_holds_a_credential(cache, server, caplog, status):  # noqa: F811
    url = server.replace("://", "://user:hunter2@") + "/latents-00000-{000000..000001}.tar?token=hunter3&x=hunter4"
    if isinstance(status, int):
        Handler.replies["manifest.json"] = (status, {}, b"<Error>hunter2</Error>")
    elif status == "broken":
        Handler.breaks["manifest.json"] = [5] * 99
    elif status == "html":
        Handler.replies["manifest.json"] = (200, {}, b"<html>")
    elif status == "closed":
        url = url.replace(server.rpartition(":")[2], "9")
    if status is None:
        shards, _ = find_shards(url)
        assert "hunter" in shards[0].url
        Handler.replies["latents-00000-000000.tar"] = (500, {}, b"")
        with pytest.raises(UserError, match=r"\*\*\*@.*latents-00000-000000.tar\?\*\*\* cannot be read") as caught:
            list(read_items(shards[0], empty_prompt=False))
    else:
        with pytest.raises(UserError, match=r"manifest.json\?\*\*\*") as caught:
            find_shards(url)
    said = "".join([*traceback.format_exception(caught.value), caplog.text])
    assert "hunter" not in said.replace(__file__, "")


@pytest.mark.parametrize(
    ("command", "words", "tries"),
    [
        ("PASSWORD=hunter2 nosuchcommand -u user:hunter2 ", "pipe:nosuchcommand ... {}: there is no such command", 1),
        ("curl --user user:hunter2 -sf ", r"pipe:curl ... {}: the command ended with status \d+ \(5 attempts\)", 5),
        ("echo hunter2; false ", r"pipe:echo ... {}: the command ended with status 1 \(5 attempts\)", 5),
    ],
)
def test_command_that_fails_is_one_line(cache, monkeypatch, caplog, command, words, tries):  # noqa: F811
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    shard = remote.Shard(f"pipe:{command} http://127.0.0.1:9/latents-00000-000000.tar", 1, 1)
    with pytest.raises(UserError, match=words.format("latents-00000-000000.tar cannot be read") + "$") as caught:
        list(read_items(shard, empty_prompt=False))
    assert len(caplog.records) == tries - 1
    assert "hunter2" not in caplog.text + "".join(traceback.format_exception(caught.value)).replace(command, "")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_threads_end_with_the_loop_and_an_error_is_raised_as_it_is(cache, server, num_workers):  # noqa: F811
    shards, _ = find_shards(server)
    for _ in StreamLoader(stream(shards, shuffle=4), num_workers, stride=1):
        break
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shards")]
    order = [keys(itertools.islice(StreamLoader(stream(shards), num_workers, stride=1), 20)) for _ in range(2)]
    assert order[0] == order[1]
    Handler.replies[shards[0].url.rpartition("/")[2]] = (403, {}, b"")
    with pytest.raises(UserError, match=r"^data.shards: \S*latents-00000-000000.tar may not be read"):
        for _ in StreamLoader(stream(shards), num_workers, stride=1):
            pass
