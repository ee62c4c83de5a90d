"""Batches of samples of one size, without end; any position of the order can be computed directly."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

# Keep the randomness of captions, and of what must stay, apart from that of the order.
CAPTIONS, PRESERVED = 0x63617074, 0x6B656570


def samples_per_batch(batch_size: int, max_tokens_per_batch: int | None, tokens: float) -> int:
    """How many samples of `tokens` tokens make a batch; one that exceeds the budget by itself is a batch of one."""
    return batch_size if max_tokens_per_batch is None else max(1, int(max_tokens_per_batch // tokens))


def drawn_caption(seed: int | None, draw: int, count: int) -> int:
    """Which of a sample's captions a draw has; a function of the run's seed and the draw's number alone.

    Args:
        seed: None for the first caption.
    """
    return 0 if seed is None or count == 1 else _drawn(seed, CAPTIONS, draw, count)


def drawn_preserved(seed: int, draw: int, count: int) -> int:
    """Which of the prompts that are to be preserved a draw has, likewise."""
    return _drawn(seed, PRESERVED, draw, count)


def _drawn(seed: int, what: int, draw: int, count: int) -> int:
    return int(np.random.default_rng((seed, what, draw)).integers(count))


class SizeBatchSampler(Sampler[list[tuple[int, int]]]):
    """Yields this rank's batches without end: lists of (index of the sample, number of the draw).

    The order of the samples in an epoch is a function of (seed, epoch). Samples are collected by size; once there are
    batch_size * world_size of one size they become a batch, of which each rank takes its slice. What is left at the
    end of an epoch waits for the next one: all batches are full, so that each draw weighs as much as any other, also of
    a size that few samples have. One process with batch size N * B sees what N processes with batch size B see; and if
    all samples have one size, the order does not depend on the batch size.

    Args:
        sizes: for each sample, what the samples of a batch must have in common.
        batch_size: samples per batch and rank; or one number for each size.
        repeats: how often an epoch has each sample; None for once.
        start: how many batches to skip, to resume a run.
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
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start = start
        limits = dict.fromkeys(sizes, batch_size) if isinstance(batch_size, int) else batch_size
        self._full = {size: limit * world_size for size, limit in limits.items()}
        self._indices = np.repeat(np.arange(len(sizes)), 1 if repeats is None else repeats)

    def epoch(self, number: int) -> list[int]:
        """The order in which an epoch draws its samples."""
        return np.random.default_rng((self.seed, number)).permutation(self._indices).tolist()

    def batches_per_epoch(self) -> float:
        """Of each rank, on average."""
        counts = Counter(self.sizes[index] for index in self._indices.tolist())
        return sum(count / self._full[size] for size, count in counts.items())

    def batches(self) -> Iterator[list[int]]:
        """The batches of all ranks together, without end."""
        waiting: dict[Hashable, list[int]] = {}
        for number in itertools.count():
            for index in self.epoch(number):
                group = waiting.setdefault(self.sizes[index], [])
                group.append(index)
                if len(group) == self._full[self.sizes[index]]:
                    yield waiting.pop(self.sizes[index])

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        draw = 0
        for position, batch in enumerate(self.batches()):
            if position >= self.start:
                share = len(batch) // self.world_size
                mine = range(self.rank * share, (self.rank + 1) * share)
                yield [(batch[i], draw + i) for i in mine]
            draw += len(batch)
