"""data.shards=URL: the batches of a copy, despite failures; refusals in one line."""

import traceback

import pytest
import torch

from cli.terminal import configure_logging
from datamodules.shards.cache import Folder
from datamodules.shards.reader import LatentReader, open_shards
from datamodules.shards.transfer import Bucket
from foundation import stores
from foundation.errors import UserError
from tests.support.servers import Handler, serve

PARTS = {"dtype": "bfloat16"}


def opened(url):
    """Return the reader of the cache at a URL."""
    source = Bucket(url, "data.shards", writes=False)
    return LatentReader(source, open_shards(source, PARTS), empty_prompt=True)


def assert_like_a_copy(read, cache):
    local = LatentReader(Folder(cache.folder), read.samples, empty_prompt=True)
    for number in range(10):
        one, other = read([(number, number)]), local([(number, number)])
        assert one.keys == other.keys
        assert all(map(torch.equal, one.tensors(), other.tensors()))


@pytest.mark.parametrize("url", ["{server}?token=x", "file://{folder}"])
def test_url_yields_the_batches_of_a_copy(cache, server, url):
    read = opened(url.format(server=server, folder=cache.folder))
    assert read.samples == open_shards(Folder(cache.folder), PARTS)
    assert_like_a_copy(read, cache)


def test_s3_yields_every_sample_despite_failures(cache, server, s3, monkeypatch, capfd):
    configure_logging()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    first = next(iter(cache.manifest()["shards"]))
    Handler.breaks |= {first: [0, 3, 500, 100], "latents-00000-000001.jsonl": [7], "manifest.json": [0, 9]}
    assert_like_a_copy(opened("s3://bucket/folder"), cache)
    assert not any(Handler.breaks.values())
    assert "attempt 2 of 5" in capfd.readouterr().err


def damage(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("fault", ["flipped", "gone", "broken", "without ranges"])
def test_sample_that_is_not_as_it_was_written_is_never_trained_on(cache, server, monkeypatch, fault):
    read = opened(server)
    row = next(row for row in cache.rows() if "key" in row)
    path = cache.folder / row["shard"]
    if fault == "flipped":
        damage(path, row["offset"] + row["bytes"] - 2)
    elif fault == "gone":
        path.unlink()
    elif fault == "broken":
        Handler.breaks[path.name] = [100] * 99
    else:
        monkeypatch.setattr(Handler, "ranges", False)
    words = "is not there" if fault == "gone" else r"cannot be read: .*\(5 attempts\)"
    with pytest.raises(UserError, match=f"^data.shards: {server}/{path.name} {words}$"):
        read([(0, 0)])


@pytest.mark.parametrize("fault", ["damaged part", "no part", "no samples"])
def test_cache_that_is_not_whole_is_refused_at_once(cache, server, fault):
    if fault == "damaged part":
        damage(cache.folder / "latents-00000-000000.jsonl", 300)
        words = r"latents-00000-000000.jsonl cannot be read: it is damaged \(.*\) \(5 attempts\)"
    elif fault == "no part":
        (cache.folder / "latents-00000-000000.jsonl").unlink()
        words = "latents-00000-000000.tar is incomplete. Copy it and its .jsonl again"
    else:
        for tar in cache.folder.glob("*.tar"):
            tar.unlink()
        cache.recover()
        cache.merge()
        words = "it contains no samples"
    with pytest.raises(UserError, match=words):
        opened(server)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{server}/nowhere", "nowhere: it contains no manifest.json"),
        ("{folder}/nowhere", "nowhere: there is no such folder or protocol"),
        ("s3:///folder", "names no bucket"),
        ("gopher://user:hunter2@host/folder", r"gopher://\*\*\*@host/folder: there is no such folder or protocol"),
        ("https://127.0.0.1:{port}/folder", r"cannot be read: its server speaks another protocol \(5 attempts\)$"),
        ("http://nowhere.invalid/folder", r"cannot be read: no such host \(5 attempts\)$"),
    ],
)
def test_unusable_url_is_one_line(cache, server, url, words):
    with pytest.raises(UserError, match=words):
        opened(url.format(server=server, folder=cache.folder, port=server.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("status", "words", "tries"),
    [
        (401, r"may not be read \(401 Unauthorized\): check the login in the URL", 1),
        (410, "cannot be read: 410 Gone", 1),
        (503, r"cannot be read: 503 Service Unavailable \(5 attempts\)", 5),
    ],
)
def test_permanent_refusal_is_tried_once(cache, server, status, words, tries):
    Handler.replies["manifest.json"] = (status, {}, b"<html>a page</html>")
    with pytest.raises(UserError, match=rf"^data.shards: {server}/manifest.json {words}$"):
        opened(server)
    assert len(Handler.served["manifest.json"]) == tries


def test_login_in_a_url_is_sent_to_its_host_only(cache, server):
    with serve(cache.folder) as other:
        Handler.replies["manifest.json"] = (302, {"Location": f"{other}/other"}, b"")
        with pytest.raises(UserError, match="it contains no manifest"):
            opened(server.replace("://", "://user:p%40ss@"))
    assert [seen["Authorization"] for seen in Handler.headers_seen] == ["Basic dXNlcjpwQHNz", None]


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, "closed"])
def test_no_message_contains_a_credential(cache, server, caplog, status):
    url = server.replace("://", "://user:hunter2@") + "?token=hunter3&x=hunter4"
    if isinstance(status, int):
        Handler.replies["manifest.json"] = (status, {}, b"<Error>hunter2</Error>")
    else:
        url = url.replace(server.rpartition(":")[2], "9")
    with pytest.raises(UserError, match=r"\?\*\*\*") as caught:
        opened(url)
    said = "".join([*traceback.format_exception(caught.value), caplog.text])
    assert "hunter" not in said.replace(__file__, "")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", "is not there: there is no bucket bucket$"),
        (403, b"<Error><Code>InvalidAccessKeyId</Code></Error>", r"may not be read \(403 InvalidAccessKeyId\): check"),
        (301, b"", "is in a bucket of another region: set AWS_REGION$"),
        (400, b"<Error><Code>ExpiredToken</Code></Error>", "cannot be read: 400 ExpiredToken$"),
    ],
)
def test_refusal_by_s3_is_one_line_at_once(server, s3, monkeypatch, status, body, words):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    Handler.replies["manifest.json"] = (status, {}, body)
    with pytest.raises(UserError, match=rf"^data.shards: s3://bucket/folder/manifest.json {words}"):
        opened("s3://bucket/folder")
    assert len(Handler.served["manifest.json"]) == 1


def test_missing_credentials_are_one_line_at_once(server, s3, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server)
    with pytest.raises(UserError, match=r"s3://bucket/folder/manifest.json needs credentials: set AWS_ACCESS_KEY_ID "):
        opened("s3://bucket/folder")
    assert len(Handler.served["token"]) == 1
    monkeypatch.setenv("AWS_PROFILE", "office")
    stores._bucket.cache_clear()
    with pytest.raises(UserError, match=r"^AWS_PROFILE: .* Run eval \"\$\(aws configure export-credentials"):
        opened("s3://bucket/folder")
