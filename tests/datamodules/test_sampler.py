"""The order of the data."""

from collections import Counter
from itertools import islice

import pytest

from datamodules.sampler import SizeBatchSampler

MIXED = ["s"] * 7 + ["m"] * 4 + ["l"]


def batches(count, **settings):
    return list(islice(SizeBatchSampler(**settings), count))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_an_epoch_holds_every_sample_once_in_batches_of_one_size(batch_size):
    epoch = SizeBatchSampler(MIXED, batch_size, seed=1).epoch(0)
    assert sorted(index for batch in epoch for index in batch) == list(range(12))
    assert all(len({MIXED[index] for index in batch}) == 1 for batch in epoch)
    assert max(map(len, epoch)) <= batch_size
    assert sum(len(batch) < batch_size for batch in epoch) <= 3, "at most one short batch for each size"


def test_order_changes_with_epoch_and_seed_and_with_nothing_else():
    sampler = SizeBatchSampler(MIXED, 2, seed=1)
    assert sampler.epoch(3) == SizeBatchSampler(MIXED, 2, seed=1).epoch(3)
    assert sampler.epoch(3) != sampler.epoch(4)
    assert sampler.epoch(3) != SizeBatchSampler(MIXED, 2, seed=2).epoch(3)


@pytest.mark.parametrize("start", [1, 5, 9, 40])
def test_starting_later_gives_the_rest_of_the_same_stream(start):
    whole = batches(60, sizes=MIXED, batch_size=2, seed=5)
    assert batches(60 - start, sizes=MIXED, batch_size=2, seed=5, start=start) == whole[start:]


def test_every_draw_has_a_number_of_its_own():
    drawn = [draw for batch in batches(50, sizes=MIXED, batch_size=2, seed=5) for _, draw in batch]
    assert drawn == list(range(len(drawn)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_what_one_process_with_the_larger_batch_sees(world_size):
    sizes = ["s"] * 6 + ["m"] * 12
    settings = {"sizes": sizes, "seed": 7}
    ranks = [batches(9, batch_size=2, rank=r, world_size=world_size, **settings) for r in range(world_size)]
    one = batches(9, batch_size=2 * world_size, **settings)
    assert [[item for part in parts for item in part] for parts in zip(*ranks, strict=True)] == one


def test_ranks_get_equally_many_samples_in_every_step():
    counts = [[len(b) for b in batches(40, sizes=MIXED, batch_size=2, seed=0, rank=r, world_size=2)] for r in (0, 1)]
    assert counts[0] == counts[1]


def test_with_one_size_the_order_does_not_depend_on_the_batch_size():
    one = [item for batch in batches(24, sizes=["s"] * 8, batch_size=1, seed=3) for item in batch]
    four = [item for batch in batches(6, sizes=["s"] * 8, batch_size=4, seed=3) for item in batch]
    assert one == four


def test_samples_are_seen_equally_often():
    seen = Counter(index for batch in batches(80, sizes=["s"] * 4, batch_size=1, seed=0) for index, _ in batch)
    assert set(seen.values()) == {20}
