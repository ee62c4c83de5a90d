"""Streams of shards over HTTP, S3 and pipes: every sample, in batches of one size."""

import itertools
import threading
from collections import Counter
from functools import partial

import pytest
import torch

from datamodules.errors import UserError
from datamodules.sampler import samples_per_batch
from datamodules.shards.remote import find_shards
from datamodules.shards.stream import Item, ShardStream, StreamLoader, read_items
from tests.support.latents import tensors
from tests.support.shard_server import Handler
from tests.support.shards import ALL, batches, braces, keys, stream


def test_folder_and_pattern_over_http_give_every_sample(cache, server):
    for pattern in (server, f"{server}/", f"{server}/{braces(cache)}"):
        shards, manifest = find_shards(pattern)
        assert manifest["fingerprint"] == cache.folder.name
        items = {item.key: item for shard in shards for _, item in read_items(shard, empty_prompt=True)}
        assert items.keys() == ALL
        for number in range(10):
            read = items[f"sample {number}"]
            assert all(torch.equal(read.tensors[name], value) for name, value in tensors(number).items())
            assert torch.equal(read.prompts[0]["prompt_embeds"], torch.full((3, 5), float(number % 2)))
            assert torch.equal(read.empty_prompt["prompt_embeds"], torch.full((3, 5), 9.0))


def test_pipe_gives_every_sample(cache):
    shards, _ = find_shards(f"pipe:cat {cache.folder}/{braces(cache)}")
    assert set(keys(itertools.islice(batches(shards), 10))) == ALL


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 1), (2, 2), (3, 3)])
def test_every_sample_is_seen_equally_often_by_all_processes_together(cache, server, world, workers):
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


def test_workers_and_shuffling_lose_nothing(cache, server):
    shards, _ = find_shards(server)
    loader = StreamLoader(stream(shards, shuffle=4), num_workers=2)
    read = list(itertools.islice(loader, 60))
    assert set(keys(read)) == ALL
    assert [draw for batch in read for draw in batch.draws] == list(range(60))
    order = keys(itertools.islice(batches(shards, shuffle=4), 10))
    assert order != sorted(order)


def test_batches_hold_one_size_and_numbers_that_no_other_sample_has(cache, server):
    shards, _ = find_shards(server)
    drawn = []
    for rank in range(2):
        loader = StreamLoader(stream(shards, limit=2, rank=rank, world=2, start=5, stride=2), num_workers=0)
        for batch in itertools.islice(loader, 8):
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
    items = [
        Item(
            str(number),
            str(number),
            {"target_mean": torch.zeros(1, 2, 2)},
            [{"prompt_embeds": torch.ones(length, 1), "prompt_embeds_mask": torch.ones(length)}],
            {},
            "",
        )
        for number, length in enumerate(lengths)
    ]
    rows = [{"tokens": length, "sizes": [[16, 16]], "mask": False} for length in lengths]
    stream._samples = lambda place, places, stopped: zip(rows, items, strict=True)
    shapes = [tuple(batch.prompt["prompt_embeds"].shape[:2]) for batch in stream.batches(0, 1, threading.Event())]
    assert all(count == 1 or count * longest <= 1000 for count, longest in shapes)
    assert shapes == [(1, 900), (2, 100), (2, 400), (3, 300), (5, 100), (1, 1100)]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_threads_end_with_the_loop_and_an_error_is_raised_as_it_is(cache, server, num_workers):
    shards, _ = find_shards(server)
    for _ in StreamLoader(stream(shards, shuffle=4), num_workers):
        break
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("shards")]
    order = [keys(itertools.islice(StreamLoader(stream(shards), num_workers), 20)) for _ in range(2)]
    assert order[0] == order[1]
    Handler.replies[shards[0].url.rpartition("/")[2]] = (403, {}, b"")
    with pytest.raises(UserError, match=r"^data.shards: \S*latents-00000-000000.tar may not be read"):
        for _ in StreamLoader(stream(shards), num_workers):
            pass
