"""Several captions for a picture: one is drawn by the seed and the number of the draw, wherever the picture is read."""

import itertools
import threading

import pytest
import torch

from datamodules.sampler import drawn_caption
from datamodules.shards.cache import Cache
from datamodules.shards.index import ShardIndex
from datamodules.shards.reader import LatentReader, Tars
from datamodules.shards.remote import find_shards
from datamodules.shards.stream import ShardStream, StreamLoader
from datamodules.shards.tar import prompt_id

CAPTIONS = 3


@pytest.fixture
def cache(tmp_path):
    return fill(Cache(tmp_path / "cache", {}), 6)


def fill(cache, count, facts=lambda number: {}):
    """Samples of one size, each with captions of its own, whose embeddings say which they are."""
    shard = cache.open_shard(0, 10**9)
    empty = prompt_id("empty_prompt", "")
    shard.add(empty, {"empty_prompt_embeds": torch.zeros(1, 1)}, {"caption": ""})
    for number in range(count):
        ids = [prompt_id("prompt", f"{number} {caption}") for caption in range(CAPTIONS)]
        for caption, id in enumerate(ids):
            embeds = torch.full((1 + caption, 1), 10.0 * number + caption)
            prompt = {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(1 + caption)}
            shard.add(id, prompt, {"caption": "x"})
        more = {"sizes": [[16, 16]], "mask": False, "tokens": 4 + CAPTIONS}
        row = {"key": str(number), "prompts": ids, "empty_prompt": empty, **more, **facts(number)}
        shard.add(f"id{number}", {"target_mean": torch.full((1, 2, 2), float(number))}, row)
    shard.seal()
    cache.merge()
    return cache


def expected(draws, numbers, seed):
    return [10.0 * number + drawn_caption(seed, draw, CAPTIONS) for draw, number in zip(draws, numbers, strict=True)]


def first_rows(batch):
    return batch.prompt["prompt_embeds"][:, 0, 0].tolist()


def test_reader_draws_them_or_takes_the_first(cache):
    index = ShardIndex(cache.rows())
    captions = [[f"{number} {caption}" for caption in range(CAPTIONS)] for number in range(6)]
    read = LatentReader(Tars(cache.folder), index, range(6), index.keys, False, captions, seed=7)
    items = [(number % 6, 100 + number) for number in range(24)]
    batch = read(items)
    assert first_rows(batch) == expected(batch.draws, [number for number, _ in items], 7)
    assert len(set(first_rows(batch))) > 12
    assert batch.prompts == [f"{int(row // 10)} {int(row % 10)}" for row in first_rows(batch)]
    plain = LatentReader(Tars(cache.folder), index, range(6), index.keys, False)(items)
    assert first_rows(plain) == [10.0 * number for number, _ in items]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_draws_by_the_numbers_of_its_batches(cache, num_workers):
    shards, _ = find_shards(str(cache.folder))
    stream = ShardStream(shards, lambda tokens: 2, 0, 7, rank=1, world_size=2, start=5, empty_prompt=False, stride=2)
    for number, batch in enumerate(itertools.islice(StreamLoader(stream, num_workers), 12), 5):
        first = (2 * number + 1) * 2
        assert batch.draws == list(range(first, first + len(batch.keys)))
        assert first_rows(batch) == expected(batch.draws, map(int, batch.keys), 7)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards")]


def test_prompts_of_other_lengths_are_other_shapes(cache):
    index = ShardIndex(cache.rows())
    _, _, lengths = index.shapes(0)
    assert len(lengths) == CAPTIONS


def test_views_of_one_sample_may_meet_in_a_batch(tmp_path):
    """Crops, flips and resolutions of a sample have its key; only what comes again may not be in a batch twice."""
    cache = Cache(tmp_path / "cache", {})
    fill(cache, 2 * CAPTIONS, facts=lambda number: {"key": "all the same"})
    shards, _ = find_shards(str(cache.folder))
    stream = ShardStream(shards, lambda tokens: 3, 0, 7, 0, 1, 0, empty_prompt=False, stride=3)
    read = list(itertools.islice(StreamLoader(stream, 0), 20))
    assert {len(batch.keys) for batch in read} == {3}
