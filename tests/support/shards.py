"""Streams of the cache of ten samples."""

import threading
from functools import partial

from datamodules.prefetch import ThreadedLoader
from datamodules.shards.stream import ShardStream


def stream(shards, limit=1, shuffle=0, rank=0, world=1, start=0, stride=1):
    return ShardStream(shards, lambda tokens: limit, shuffle, 7, rank, world, start, empty_prompt=True, stride=stride)


def batches(*args, **settings):
    return stream(*args, **settings).batches(0, 1, threading.Event())


def keys(batches):
    return [key for batch in batches for key in batch.keys]


def loader(*args, workers, **settings):
    jobs = partial(stream(*args, **settings).jobs, max(1, workers))
    return ThreadedLoader(jobs, workers, ahead=max(1, workers) - 1)


ALL = {f"sample {n}" for n in range(10)}
