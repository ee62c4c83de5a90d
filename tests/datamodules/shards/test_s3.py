"""Keys, buckets and regions of S3."""

import itertools
import traceback
import urllib.error
import urllib.request

import pytest

from datamodules.errors import UserError
from datamodules.shards import stores
from datamodules.shards.remote import find_shards
from tests.support.shard_server import Handler, upload
from tests.support.shards import ALL, batches, braces, keys


def test_s3_gives_every_sample(cache, s3):
    upload(cache.folder)
    for pattern in ("s3://bucket/folder", f"s3://bucket/folder/{braces(cache)}"):
        shards, _ = find_shards(pattern)
        assert set(keys(itertools.islice(batches(shards), 10))) == ALL
    with pytest.raises(UserError, match=r"s3://bucket/nowhere/manifest.json is not there"):
        find_shards("s3://bucket/nowhere")


def enforce_keys(s3, after):
    """Let moto ask for keys that are known, after so many requests."""
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


def test_profile_gives_what_the_environment_does_not(cache, server, s3, monkeypatch, tmp_path):
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
