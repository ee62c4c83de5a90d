"""A cache, and servers of it."""

import pytest

from datamodules.shards import transfer
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


@pytest.fixture
def cache(tmp_path):
    """Ten samples in several tars."""
    cache = Cache(tmp_path / "cache", {"dtype": "bfloat16"})
    cache.seal(fill(cache, 10, full=9_000))
    cache.merge()
    return cache
