"""Streams of a cache of ten samples."""

import threading

from datamodules.shards.stream import ShardStream


def stream(shards, limit=1, shuffle=0, rank=0, world=1, start=0, stride=1):
    return ShardStream(shards, lambda tokens: limit, shuffle, 7, rank, world, start, empty_prompt=True, stride=stride)


def batches(*args, **settings):
    return stream(*args, **settings).batches(0, 1, threading.Event())


def keys(batches):
    return [key for batch in batches for key in batch.keys]


ALL = {f"sample {n}" for n in range(10)}


def braces(cache):
    count = len(cache.manifest()["shards"])
    assert count > 2
    return f"latents-00000-{{000000..{count - 1:06d}}}.tar"
