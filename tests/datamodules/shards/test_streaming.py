"""Streams of shards over HTTP and S3: every sample, in batches of one size, despite failures; refusals in one line."""

import itertools
import threading
import traceback
import urllib.request
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from datamodules.errors import UserError
from datamodules.sampler import samples_per_batch
from datamodules.shards import stores, transfer
from datamodules.shards.stream import Item, ShardStream, find_shards, read_items, read_rows
from tasks.terminal import configure_logging
from tests.support.latents import tensors
from tests.support.shard_server import Handler, serve, upload
from tests.support.shards import ALL, batches, keys, loader, stream


def items_of(shards, empty_prompt=False):
    return {item.key: item for shard in shards for _, item in read_items(shard, empty_prompt)}


def test_folder_over_http_yields_every_sample(cache, server):
    for url in (server, f"{server}/", f"{server}?token=x"):
        shards, manifest = find_shards(url)
        assert manifest["fingerprint"] == cache.folder.name
        items = items_of(shards, empty_prompt=True)
        assert items.keys() == ALL
        for number in range(10):
            read = items[f"sample {number}"]
            assert all(torch.equal(read.tensors[name], value) for name, value in tensors(number).items())
            assert torch.equal(read.prompts[0]["prompt_embeds"], torch.full((3, 5), float(number % 2)))
            assert torch.equal(read.empty_prompt["prompt_embeds"], torch.full((3, 5), 9.0))


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 1), (3, 3)])
def test_every_sample_is_seen_equally_often_by_all_processes_together(cache, server, world, workers):
    """This holds with fewer shards than workers as well; nothing repeats before all have been seen about once."""
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


def test_workers_and_shuffling_lose_nothing(cache, server):
    shards, _ = find_shards(server)
    read = list(itertools.islice(loader(shards, shuffle=4, workers=2), 60))
    assert set(keys(read)) == ALL
    assert [draw for batch in read for draw in batch.draws] == list(range(60))
    order = keys(itertools.islice(batches(shards, shuffle=4), 10))
    assert order != sorted(order)


def test_batches_have_one_size_and_draws_of_their_own(cache, server):
    shards, _ = find_shards(server)
    drawn = []
    for rank in range(2):
        for batch in itertools.islice(loader(shards, limit=2, rank=rank, world=2, start=5, stride=2, workers=0), 8):
            assert len({control.shape for control in batch.controls}) == 1
            assert batch.target_mean.shape[0] == 2
            drawn += batch.draws
    assert len(drawn) == len(set(drawn)) == 32
    assert min(drawn) == 20


def test_damaged_sample_is_never_trained_on(cache, server):
    shards, _ = find_shards(server)
    row = next(row for row in cache.rows() if "key" in row)
    path = cache.folder / row["shard"]
    data = bytearray(path.read_bytes())
    data[row["offset"] + row["bytes"] - 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{row['id']} is damaged"):
        list(read_items(shards[0], empty_prompt=False))


def test_rare_size_does_not_wait_for_copies_of_itself(cache, server):
    shards, _ = find_shards(server)
    read = list(itertools.islice(batches(shards, limit=16), 12))
    assert all(len(batch.keys) == len(set(batch.keys)) for batch in read)
    assert Counter(keys(read)) == dict.fromkeys(ALL, 6)


def test_batch_padded_to_its_longest_prompt_keeps_within_the_budget():
    """900 tokens and nine times 100 are 10 x 900 once they are padded, not 1800."""
    lengths = [900, 100, 100, 400, 300, 100, 300, 100, 100, 100, 100, 100, 100, 1100, 50]
    stream = ShardStream([], partial(samples_per_batch, 1, 1000), 0, 7, 0, 1, 0, empty_prompt=False, stride=1)
    latent = {"target_mean": torch.zeros(1, 2, 2)}
    prompts = [{"prompt_embeds": torch.ones(length, 1), "prompt_embeds_mask": torch.ones(length)} for length in lengths]
    items = [Item(str(number), str(number), latent, [prompt], {}, "") for number, prompt in enumerate(prompts)]
    rows = [{"tokens": length, "sizes": [[16, 16]], "mask": False} for length in lengths]
    stream._samples = lambda place, places, stopped: zip(rows, items, strict=True)
    shapes = [tuple(batch.prompt["prompt_embeds"].shape[:2]) for batch in stream.batches(0, 1, threading.Event())]
    assert shapes == [(1, 900), (2, 100), (2, 400), (3, 300), (5, 100), (1, 1100)]


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_end_with_the_loop_and_raise_errors_unchanged(cache, server, workers):
    shards, _ = find_shards(server)
    for _ in loader(shards, shuffle=4, workers=workers):
        break
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shards")]
    order = [keys(itertools.islice(loader(shards, workers=workers), 20)) for _ in range(2)]
    assert order[0] == order[1]
    Handler.replies[shards[0].url.rpartition("/")[2]] = (403, {}, b"")
    with pytest.raises(UserError, match=r"^data.shards: \S*latents-00000-000000.tar may not be read"):
        for _ in loader(shards, workers=workers):
            pass


@pytest.mark.parametrize("ranges", [True, False])
def test_transfer_that_breaks_off_resumes_after_the_last_sample(cache, server, monkeypatch, capfd, ranges):
    configure_logging()
    monkeypatch.setattr(Handler, "ranges", ranges)
    shards, _ = find_shards(server)
    name = shards[0].url.rpartition("/")[2]
    size = (cache.folder / name).stat().st_size
    Handler.breaks[name] = [place for place in (1, 600, size // 2, size - 12_000) for _ in range(1 if ranges else 2)]
    read = [item.key for shard in shards for _, item in read_items(shard, empty_prompt=False)]
    assert sorted(read) == sorted(ALL), "nothing twice, nothing left out"
    starts = [int(one[6:-1]) for one in Handler.served[name] if one is not None]
    assert starts == sorted(starts)
    assert max(starts) > 0
    assert "attempt 2 of 5" in capfd.readouterr().err


def test_s3_yields_every_sample_despite_failures(cache, server, s3, monkeypatch):
    upload(cache.folder)
    monkeypatch.setattr(Handler, "upstream", s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    tar = next(iter(cache.manifest()["shards"]))
    Handler.breaks[tar] = [3, 5000, 10_000]
    shards, _ = find_shards("s3://bucket/folder")
    assert items_of(shards, empty_prompt=True).keys() == ALL
    assert not Handler.breaks[tar]
    with pytest.raises(UserError, match=r"s3://bucket/nowhere/manifest.json is not there"):
        find_shards("s3://bucket/nowhere")


def test_remote_that_stays_broken_is_one_line(cache, server):
    shards, _ = find_shards(server)
    Handler.breaks[shards[0].url.rpartition("/")[2]] = [100] * 99
    with pytest.raises(UserError, match=r"cannot be read: .*\(5 attempts\)"):
        list(read_items(shards[0], empty_prompt=False))


def test_shard_that_is_shorter_than_its_manifest_is_never_accepted(cache, server):
    """Cut between members and inside of them."""
    shards, _ = find_shards(server)
    path = cache.folder / shards[0].url.rpartition("/")[2]
    data = path.read_bytes()
    for size in (10_240, 3_584, 700):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match="cannot be read"):
            list(read_items(shards[0], empty_prompt=False))


def test_transfer_resumes_when_its_server_comes_back(cache, server, monkeypatch):
    monkeypatch.setattr(Handler, "ranges", True)
    first, started = serve(cache.folder), []
    port = first.server_address[1]
    shards, _ = find_shards(f"http://127.0.0.1:{port}")

    class Pauses(threading.Event):
        count = 0

        def wait(self, timeout=None):
            self.count += 1
            if self.count == 3:  # the third attempt finds it
                started.append(serve(cache.folder, port))
            return False

    Handler.breaks[shards[0].url.rpartition("/")[2]] = [6000]
    rows = read_rows(shards[0], Pauses())
    next(rows)
    first.shutdown()
    first.server_close()
    assert len(list(rows)) == shards[0].samples + shards[0].prompts - 1
    started[0].shutdown()
    started[0].server_close()


def test_file_that_changes_while_it_is_read_is_never_mixed(cache, server, monkeypatch):
    monkeypatch.setattr(Handler, "ranges", True)
    shards, _ = find_shards(server)
    first, second = (Path(cache.folder, shard.url.rpartition("/")[2]) for shard in shards[:2])
    Handler.breaks[first.name] = [12_000]  # after the block that is read for the first group
    rows = read_rows(shards[0])
    next(rows)
    first.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match=r"latents-00000-000000.tar changed while it was read. Start again.$"):
        list(rows)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{server}/nowhere", "nowhere/manifest.json is not there"),
        ("{server}/manifest.json/folder", "is not there"),
        ("file://{folder}/nowhere", "nowhere/manifest.json is not there"),
        ("s3:///folder", "names no bucket"),
        ("gopher://user:hunter2@host/folder", r"gopher://\*\*\*@host/folder/manifest.json: there is no such folder or"),
        ("my_shards", "my_shards/manifest.json: there is no such folder or protocol"),
        ("https://127.0.0.1:{port}/folder", r"cannot be read: its server speaks another protocol \(5 attempts\)$"),
        ("http://nowhere.invalid/folder", r"cannot be read: no such host \(5 attempts\)$"),
        ("http://127.0.0.1:9/folder", "cannot be read"),
    ],
)
def test_unusable_url_is_one_line(cache, server, url, words):
    with pytest.raises(UserError, match=words):
        find_shards(url.format(server=server, folder=cache.folder, port=server.rpartition(":")[2]))


def test_manifest_without_samples_and_page_that_is_no_manifest(cache, server):
    (cache.folder / "manifest.json").write_text("<html>sign in</html>")
    with pytest.raises(UserError, match="is no manifest of a cache"):
        find_shards(server)
    for tar in cache.folder.glob("*.tar"):
        tar.unlink()
    cache.recover()
    cache.merge()
    with pytest.raises(UserError, match="contains no samples"):
        find_shards(server)


def test_shard_that_vanishes_is_one_line(cache, server):
    shards, _ = find_shards(server)
    (cache.folder / shards[0].url.rpartition("/")[2]).unlink()
    with pytest.raises(UserError, match=r"latents-00000-000000.tar is not there"):
        list(read_items(shards[0], empty_prompt=False))


@pytest.mark.parametrize(
    ("status", "words", "tries"),
    [
        (401, r"may not be read \(401 Unauthorized\): check the login in the URL", 1),
        (403, r"may not be read \(403 Forbidden\): check the login in the URL", 1),
        (410, "cannot be read: 410 Gone", 1),
        (429, r"cannot be read: 429 Too Many Requests \(5 attempts\)", 5),
        (503, r"cannot be read: 503 Service Unavailable \(5 attempts\)", 5),
    ],
)
def test_permanent_refusal_is_tried_once(cache, server, status, words, tries):
    Handler.replies["manifest.json"] = (status, {}, b"<html>a page</html>")
    with pytest.raises(UserError, match=rf"^data.shards: {server}/manifest.json {words}$"):
        find_shards(server)
    assert len(Handler.served["manifest.json"]) == tries


def test_login_in_a_url_is_sent_to_its_host_only(cache, server):
    other = serve(cache.folder)
    Handler.replies["manifest.json"] = (302, {"Location": f"http://127.0.0.1:{other.server_address[1]}/other"}, b"")
    with pytest.raises(UserError, match="is not there"):
        find_shards(server.replace("://", "://user:p%40ss@"))
    other.shutdown()
    other.server_close()
    assert [seen["Authorization"] for seen in Handler.headers_seen] == ["Basic dXNlcjpwQHNz", None]


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, 404, 503, "broken", "html", "closed"])
def test_no_message_contains_a_credential(cache, server, caplog, status):
    url = server.replace("://", "://user:hunter2@") + "?token=hunter3&x=hunter4"
    if isinstance(status, int):
        Handler.replies["manifest.json"] = (status, {}, b"<Error>hunter2</Error>")
    elif status == "broken":
        Handler.breaks["manifest.json"] = [5] * 99
    elif status == "html":
        Handler.replies["manifest.json"] = (200, {}, b"<html>")
    elif status == "closed":
        url = url.replace(server.rpartition(":")[2], "9")
    with pytest.raises(UserError, match=r"manifest.json\?\*\*\*") as caught:
        find_shards(url)
    said = "".join([*traceback.format_exception(caught.value), caplog.text])
    assert "hunter" not in said.replace(__file__, "")


def enforce_keys(s3, after):
    """Let moto require known keys after so many requests."""
    plain = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(f"{s3}/moto-api/reset-auth", str(after).encode(), plain)).close()


def test_absent_bucket_and_wrong_keys_are_tried_once(cache, server, s3, monkeypatch):
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
        ((301, {}, b""), "is in a bucket of another region: set AWS_REGION"),
        ((400, {}, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>"), "set AWS_REGION"),
        ((400, {}, b"<Error><Code>ExpiredToken</Code><Message>0123</Message>"), "cannot be read: 400 ExpiredToken"),
    ],
)
def test_bucket_of_another_region_is_one_line_at_once(server, s3, monkeypatch, reply, words):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    Handler.replies["manifest.json"] = reply
    with pytest.raises(UserError, match=rf"^data.shards: s3://bucket/folder/manifest.json .*{words}$"):
        find_shards("s3://bucket/folder")
    assert len(Handler.served["manifest.json"]) == 1


def test_missing_credentials_are_one_line_at_once(server, s3, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server)
    with pytest.raises(UserError, match=r"s3://bucket/folder/manifest.json needs credentials: set AWS_ACCESS_KEY_ID "):
        find_shards("s3://bucket/folder")
    assert len(Handler.served["token"]) == 1


def test_profile_of_aws_fills_what_the_environment_lacks(cache, server, s3, monkeypatch, tmp_path):
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
    assert stores.aws_settings() == {"region": "eu-west-1", "endpoint": server}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for name in ("office", "none"):
        monkeypatch.setenv("AWS_PROFILE", name)
        with pytest.raises(UserError, match=f"aws configure export-credentials --profile {name}"):
            stores.aws_settings()
    (tmp_path / "credentials").write_text("aws_secret_access_key = 0123456789")
    with pytest.raises(UserError, match=r"credentials cannot be read") as caught:
        stores.aws_settings()
    assert "0123456789" not in "".join(traceback.format_exception(caught.value))


def test_pause_before_a_retry_ends_when_the_bytes_are_no_longer_needed():
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(transfer.StoppedError):
        transfer.Attempts("http://host/x", stopped=stopped).after(EOFError("broke off"))
