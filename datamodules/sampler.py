"""Batches of samples of one size, without end."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import Sampler

# Separate the randomness of captions and of preserved prompts from that of the order.
CAPTIONS, PRESERVED = 0x63617074, 0x6B656570


def samples_per_batch(batch_size: int, max_tokens_per_batch: int | None, tokens: float) -> int:
    """Return how many samples of `tokens` tokens make a batch; a sample above the budget is a batch of its own."""
    return batch_size if max_tokens_per_batch is None else max(1, int(max_tokens_per_batch // tokens))


def drawn(seed: int | None, kind: int, draw: int, count: int) -> int:
    """Return the index of the prompt for a draw, a function of the run's seed and the draw's index only.

    Args:
        seed: None for the first prompt.
        kind: `CAPTIONS` or `PRESERVED`.
    """
    return 0 if seed is None or count == 1 else int(np.random.default_rng((seed, kind, draw)).integers(count))


class SizeBatchSampler(Sampler[list[tuple[int, int]]]):
    """This rank's batches, without end: lists of (index of the sample, index of the draw).

    The order of the samples in an epoch is a function of (seed, epoch). Samples are collected by size; once there are
    batch_size * world_size of one size they become a batch, of which each rank takes its slice. The rest at the end of
    an epoch waits for the next one: all batches are full, so each draw has the same weight, even for a rare size. One
    process with batch size N * B sees the same samples as N processes with batch size B; and if all samples have one
    size, the order does not depend on the batch size.

    A later start draws all earlier batches again, which takes a second for a million draws.

    Args:
        sizes: for each sample, its size; the samples of a batch have the same.
        batch_size: samples per batch and rank; or a number for each size.
        repeats: how often an epoch contains each sample; None for once.
        start: number of batches to skip, to resume a run.
    """

    def __init__(
        self,
        sizes: Sequence[Hashable],
        batch_size: Mapping[Any, int] | int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        repeats: Sequence[int] | None = None,
    ) -> None:
        self.sizes = sizes
        self.limits = dict.fromkeys(sizes, batch_size) if isinstance(batch_size, int) else batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start = start
        self.repeats = repeats

    def epoch(self, number: int) -> list[int]:
        """Return the order in which an epoch draws its samples."""
        order = np.repeat(np.arange(len(self.sizes)), 1 if self.repeats is None else self.repeats)
        np.random.default_rng((self.seed, number)).shuffle(order)
        return order.tolist()

    def batches_per_epoch(self) -> float:
        """Return each rank's batches in an epoch, on average."""
        repeats = self.repeats or [1] * len(self.sizes)
        drawn = zip(self.sizes, repeats, strict=True)
        return sum(times / self.limits[size] for size, times in drawn) / self.world_size

    def batches(self) -> Iterator[list[int]]:
        """Yield the batches of all ranks together, without end."""
        waiting: dict[Hashable, list[int]] = defaultdict(list)
        for number in count():
            for index in self.epoch(number):
                size = self.sizes[index]
                waiting[size].append(index)
                if len(waiting[size]) == self.limits[size] * self.world_size:
                    yield waiting.pop(size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        draw = 0
        for position, batch in enumerate(self.batches()):
            if position >= self.start:
                share = len(batch) // self.world_size
                mine = range(self.rank * share, (self.rank + 1) * share)
                yield [(batch[place], draw + place) for place in mine]
            draw += len(batch)
