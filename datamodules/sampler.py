"""The random choices of draws, and batches of samples of one size, without end."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

# Separate the random choices of a draw from each other, and from the order.
CAPTIONS, PRESERVED, DROPPED, REFERENCES = 0x63617074, 0x6B656570, 0x64726F70, 0x72656673


def samples_per_batch(batch_size: int, max_tokens_per_batch: int | None, tokens: float) -> int:
    """Return how many samples of `tokens` tokens make a batch; a sample above the budget is a batch of its own."""
    return batch_size if max_tokens_per_batch is None else max(1, int(max_tokens_per_batch // tokens))


class Choices(NamedTuple):
    """The random choices of each draw: functions of the run's seed and the draw's index only.

    Attributes:
        seed: None for no randomness: the first caption, and all condition images.
        caption_dropout_rate: share of the draws whose caption is the empty prompt.
        reference_dropout: share of the condition images that are left out, each independently.
    """

    seed: int | None = None
    caption_dropout_rate: float = 0.0
    reference_dropout: float = 0.0

    def caption(self, draw: int, captions: int) -> int | None:
        """Return the index of a draw's caption; None where it is dropped."""
        if self._drops(DROPPED, draw, 1, self.caption_dropout_rate)[0]:
            return None
        return self._index(CAPTIONS, draw, captions)

    def preserved(self, draw: int, prompts: int) -> int:
        """Return the index of a draw's preserved prompt."""
        return self._index(PRESERVED, draw, prompts)

    def references(self, draw: int, images: int) -> tuple[int, ...]:
        """Return the indices of the condition images that a draw keeps."""
        dropped = self._drops(REFERENCES, draw, images, self.reference_dropout)
        return tuple(index for index, one in enumerate(dropped) if not one)

    def _index(self, kind: int, draw: int, count: int) -> int:
        if self.seed is None or count == 1:
            return 0
        return int(np.random.default_rng((self.seed, kind, draw)).integers(count))

    def _drops(self, kind: int, draw: int, count: int, rate: float) -> Sequence[bool]:
        if self.seed is None or not rate:
            return [False] * count
        return (np.random.default_rng((self.seed, kind, draw)).random(count) < rate).tolist()


# The first caption and all condition images.
FIRST = Choices()


@dataclass(eq=False)
class SizeBatchSampler(Sampler[list[tuple[int, int]]]):
    """This rank's batches, without end: lists of (index of the sample, index of the draw).

    The order of the samples in an epoch is a function of (seed, epoch), and draws are counted in this order. Samples
    are collected by size; once there are batch_size * world_size of one size they become a batch, of which each rank
    takes its slice. The rest at the end of an epoch waits for the next one: all batches are full, so each draw has the
    same weight, even for a rare size. One process with batch size N * B sees the same samples as N processes with batch
    size B; and if all samples have one size, the order does not depend on the batch size.

    A later start draws all earlier batches again, which takes a second for a million draws.

    Args:
        sizes: for each sample, its size; the samples of a batch have the same.
        alike: returns a second key that they share, by (index of the sample, index of the draw); None for none.
        batch_size: samples per batch and rank; or a number for each size.
        repeats: how often an epoch contains each sample; None for once.
        start: number of batches to skip, to resume a run.
    """

    sizes: Sequence[Hashable]
    batch_size: Mapping[Any, int] | int
    seed: int
    rank: int = 0
    world_size: int = 1
    start: int = 0
    repeats: Sequence[int] | None = None
    alike: Callable[[int, int], Hashable] | None = None

    def __post_init__(self) -> None:
        size = self.batch_size
        self.limits = dict.fromkeys(self.sizes, size) if isinstance(size, int) else size

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

    def batches(self) -> Iterator[list[tuple[int, int]]]:
        """Yield the batches of all ranks together, without end."""
        waiting: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        order = (index for number in count() for index in self.epoch(number))
        for draw, index in enumerate(order):
            size = self.sizes[index]
            group = size, None if self.alike is None else self.alike(index, draw)
            waiting[group].append((index, draw))
            if len(waiting[group]) == self.limits[size] * self.world_size:
                yield waiting.pop(group)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in islice(self.batches(), self.start, None):
            share = len(batch) // self.world_size
            yield batch[self.rank * share : (self.rank + 1) * share]
