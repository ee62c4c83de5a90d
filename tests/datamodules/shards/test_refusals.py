"""Shards that cannot be read: one line, and no credential in it."""

import traceback

import pytest

from datamodules.errors import UserError
from datamodules.shards import remote, transfer
from datamodules.shards.remote import find_shards
from datamodules.shards.stream import read_items
from tests.support.shard_server import Handler, serve


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
def test_url_that_cannot_be_used(cache, server, pattern, words):
    with pytest.raises(UserError, match=words):
        find_shards(pattern.format(server=server, folder=cache.folder, port=server.rpartition(":")[2]))


def test_manifest_without_samples(cache, server):
    for tar in cache.folder.glob("*.tar"):
        tar.unlink()
    cache.recover()
    with pytest.raises(UserError, match="no samples"):
        find_shards(server)


def test_page_that_is_no_manifest(cache, server):
    (cache.folder / "manifest.json").write_text("<html>sign in</html>")
    with pytest.raises(UserError, match="is no manifest of a cache"):
        find_shards(server)


def test_shard_that_vanishes_is_one_line(cache, server):
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
def test_refusal_is_one_line_and_what_lasts_is_tried_once(cache, server, status, words, tries):
    Handler.replies["manifest.json"] = (status, {}, b"<html>a page</html>")
    with pytest.raises(UserError, match=rf"^data.shards: {server}/manifest.json {words}$"):
        find_shards(server)
    assert len(Handler.served["manifest.json"]) == tries


def test_login_in_an_address_is_sent_to_its_host_alone(cache, server):
    other = serve(cache.folder)
    Handler.replies["manifest.json"] = (302, {"Location": f"http://127.0.0.1:{other.server_address[1]}/other"}, b"")
    with pytest.raises(UserError, match="is not there"):
        find_shards(server.replace("://", "://user:p%40ss@"))
    other.shutdown()
    other.server_close()
    assert [seen["Authorization"] for seen in Handler.headers_seen] == ["Basic dXNlcjpwQHNz", None]


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, 403, 404, 503, "broken", "html", "closed"])
def test_no_message_holds_a_credential(cache, server, caplog, status):
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
def test_command_that_fails_is_one_line(cache, monkeypatch, caplog, command, words, tries):
    monkeypatch.setattr(transfer, "PAUSE", 0.0)
    shard = remote.Shard(f"pipe:{command} http://127.0.0.1:9/latents-00000-000000.tar", 1, 1)
    with pytest.raises(UserError, match=words.format("latents-00000-000000.tar cannot be read") + "$") as caught:
        list(read_items(shard, empty_prompt=False))
    assert len(caplog.records) == tries - 1
    assert "hunter2" not in caplog.text + "".join(traceback.format_exception(caught.value)).replace(command, "")
