"""A cache, and servers of it."""

import os

import pytest

from datamodules.shards import stores, transfer
from datamodules.shards.cache import Cache
from tests.support.latents import fill
from tests.support.servers import Handler, serve


@pytest.fixture
def server(cache, monkeypatch):
    monkeypatch.setattr(transfer, "PAUSE", 0.01)
    for facts in (Handler.breaks, Handler.replies, Handler.served, Handler.headers_seen):
        facts.clear()
    with serve(cache.folder) as address:
        yield address


@pytest.fixture(scope="session")
def moto_server():
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(moto_server, monkeypatch):
    """Start an S3 server, and clear all other AWS settings of the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secretsecretsecret",
        "AWS_ENDPOINT_URL": moto_server,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    stores._bucket.cache_clear()
    yield moto_server
    stores._bucket.cache_clear()


@pytest.fixture
def cache(tmp_path):
    """Ten samples in several tars."""
    cache = Cache(tmp_path / "cache", {"dtype": "bfloat16"})
    cache.seal(fill(cache, 10, full=9_000))
    cache.merge()
    return cache
