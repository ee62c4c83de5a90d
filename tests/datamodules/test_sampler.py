"""The order of the data."""

from collections import Counter
from itertools import islice

import pytest

from datamodules.sampler import FIRST, Choices, SizeBatchSampler

MIXED = ["s"] * 7 + ["m"] * 4 + ["l"]


def batches(count, **settings):
    return list(islice(SizeBatchSampler(**settings), count))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_all_batches_are_full_and_of_one_size(batch_size):
    """This includes sizes with fewer samples than a batch: a half-full batch would give its samples more weight."""
    stream = [[index for index, _ in batch] for batch in batches(200, sizes=MIXED, batch_size=batch_size, seed=1)]
    assert {len(batch) for batch in stream} == {batch_size}
    assert all(len({MIXED[index] for index in batch}) == 1 for batch in stream)


@pytest.mark.parametrize("batch_size", [1, 3, 5, {"s": 4, "m": 2, "l": 1}])
def test_samples_are_drawn_equally_often(batch_size):
    """Counts differ only by the samples that wait for a batch, less than one batch per size."""
    sampler = SizeBatchSampler(MIXED, batch_size, seed=0)
    epochs = 60
    count = round(sampler.batches_per_epoch() * epochs)
    seen = Counter(index for batch in islice(sampler, count) for index, _ in batch)
    assert seen.total() == pytest.approx(12 * epochs, abs=15)
    assert all(abs(seen[index] - epochs) <= 6 for index in range(12))


def test_repeats_are_drawn_that_often_in_an_epoch():
    sampler = SizeBatchSampler(["s"] * 3, 1, seed=0, repeats=[1, 2, 5])
    assert sampler.batches_per_epoch() == 8
    for number in range(3):
        seen = Counter(index for [(index, _)] in islice(sampler, 8 * number, 8 * number + 8))
        assert seen == {0: 1, 1: 2, 2: 5}


def test_choices_are_functions_of_the_seed_and_the_draw():
    choices = Choices(7, caption_dropout_rate=0.25, reference_dropout=0.5)
    draws = range(4000)
    captions = [choices.caption(draw, 3) for draw in draws]
    assert captions == [choices.caption(draw, 3) for draw in draws]
    assert captions != [choices._replace(seed=8).caption(draw, 3) for draw in draws]
    assert all(900 < captions.count(one) < 1100 for one in (0, 1, 2, None))
    preserved = [choices.preserved(draw, 3) for draw in draws]
    assert preserved == [choices.preserved(draw, 3) for draw in draws]
    assert all(1200 < preserved.count(one) < 1470 for one in range(3))
    assert preserved not in ([choices._replace(seed=8).preserved(draw, 3) for draw in draws], captions)
    plain = [Choices(7).caption(draw, 3) for draw in draws]
    assert preserved != plain
    assert all(one in (None, other) for one, other in zip(captions, plain, strict=True)), "dropout changes no caption"
    kept = Counter(choices.references(draw, 2) for draw in draws)
    assert kept.keys() == {(), (0,), (1,), (0, 1)}, "each is dropped independently"
    assert all(900 < count < 1100 for count in kept.values())
    assert {choices.references(draw, 0) for draw in draws} == {()}
    assert {FIRST.caption(draw, 3) for draw in draws} == {0}
    assert {FIRST.references(draw, 2) for draw in draws} == {(0, 1)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_draws_of_a_batch_are_alike(world_size):
    """Each draw has the number, and so the choices, that it has without this condition."""
    settings = {"sizes": MIXED, "batch_size": 2, "seed": 1, "world_size": world_size}
    stream = batches(300, alike=lambda index, draw: draw % 3, **settings)
    assert all(len({draw % 3 for _, draw in batch}) == 1 for batch in stream)
    plain = dict(item for batch in batches(600, **settings) for item in map(reversed, batch))
    assert all(plain.get(draw, index) == index for batch in stream for index, draw in batch)


def test_order_changes_with_epoch_and_seed_and_with_nothing_else():
    sampler = SizeBatchSampler(MIXED, 2, seed=1)
    order = sampler.epoch(3)
    assert order == SizeBatchSampler(MIXED, 2, seed=1).epoch(3)
    assert sorted(order) == list(range(12))
    assert order not in (sampler.epoch(4), SizeBatchSampler(MIXED, 2, seed=2).epoch(3))


@pytest.mark.parametrize("batch_size", [2, {"s": 4, "m": 2, "l": 1}])
def test_a_late_start_continues_the_order(batch_size):
    settings = {"sizes": MIXED, "batch_size": batch_size, "seed": 5, "rank": 1, "world_size": 2}
    assert batches(12, start=30, **settings) == batches(42, **settings)[30:]


def test_every_draw_has_a_number_of_its_own():
    sampler = SizeBatchSampler(MIXED, 2, seed=5)
    order = [index for epoch in range(12) for index in sampler.epoch(epoch)]
    items = [item for batch in islice(sampler, 50) for item in batch]
    assert len({draw for _, draw in items}) == 100
    assert all(order[draw] == index for index, draw in items)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_what_one_process_with_the_larger_batch_sees(world_size):
    settings = {"sizes": MIXED, "seed": 7}
    ranks = [batches(9, batch_size=2, rank=r, world_size=world_size, **settings) for r in range(world_size)]
    one = batches(9, batch_size=2 * world_size, **settings)
    assert [[item for part in parts for item in part] for parts in zip(*ranks, strict=True)] == one


def test_with_one_size_the_order_does_not_depend_on_the_batch_size():
    one = [item for batch in batches(24, sizes=["s"] * 8, batch_size=1, seed=3) for item in batch]
    four = [item for batch in batches(6, sizes=["s"] * 8, batch_size=4, seed=3) for item in batch]
    assert one == four
