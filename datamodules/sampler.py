"""Batches of samples of one size, without end."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import Sampler

Numbers = np.ndarray[Any, np.dtype[np.integer[Any]]]

# Separate the randomness of captions and of preserved prompts from that of the order.
CAPTIONS, PRESERVED = 0x63617074, 0x6B656570
# Draws that are collected into batches at once.
BLOCK = 2**16


class Sizes(Sequence[Any]):
    """A sequence of few different values: a list of ten million takes 10 or 20 MB.

    Args:
        kinds: all different.
        codes: for each sample the index of its kind.
    """

    def __init__(self, kinds: Sequence[Hashable], codes: Numbers | Sequence[int]) -> None:
        self.kinds: list[Any] = list(kinds)
        self.codes = np.asarray(codes, dtype=np.min_scalar_type(len(self.kinds)))

    @classmethod
    def of(cls, sizes: Iterable[Hashable]) -> "Sizes":
        """Build from a list; the kinds keep the order of their first appearance."""
        if isinstance(sizes, Sizes):
            return sizes
        known: dict[Hashable, int] = {}
        codes = np.fromiter((known.setdefault(size, len(known)) for size in sizes), dtype=np.int32)
        return cls(list(known), codes)

    def take(self, numbers: Numbers | Sequence[int]) -> "Sizes":
        """Return the sizes of the samples with these indices."""
        return Sizes(self.kinds, self.codes[np.asarray(numbers, dtype=np.intp)])

    def counts(self) -> Counter[Any]:
        """Return the number of samples of each kind."""
        found = np.bincount(self.codes, minlength=len(self.kinds)).tolist()
        return Counter({kind: count for kind, count in zip(self.kinds, found, strict=True) if count})

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, number: Any) -> Any:
        return self.kinds[self.codes[number]]

    def __iter__(self) -> Iterator[Any]:
        return map(self.kinds.__getitem__, self.codes.data)


def samples_per_batch(batch_size: int, max_tokens_per_batch: int | None, tokens: float) -> int:
    """Return how many samples of `tokens` tokens make a batch; a sample above the budget is a batch of its own."""
    return batch_size if max_tokens_per_batch is None else max(1, int(max_tokens_per_batch // tokens))


def drawn_caption(seed: int | None, draw: int, count: int) -> int:
    """Return the index of the caption for a draw, a function of the run's seed and the draw's index only.

    Args:
        seed: None for the first caption.
    """
    return 0 if seed is None or count == 1 else _drawn(seed, CAPTIONS, draw, count)


def drawn_preserved(seed: int, draw: int, count: int) -> int:
    """Return the index of the preserved prompt for a draw, likewise."""
    return _drawn(seed, PRESERVED, draw, count)


def _drawn(seed: int, what: int, draw: int, count: int) -> int:
    return int(np.random.default_rng((seed, what, draw)).integers(count))


class SizeBatchSampler(Sampler[list[tuple[int, int]]]):
    """This rank's batches, without end: lists of (index of the sample, index of the draw).

    The order of the samples in an epoch is a function of (seed, epoch). Samples are collected by size; once there are
    batch_size * world_size of one size they become a batch, of which each rank takes its slice. The rest at the end of
    an epoch waits for the next one: all batches are full, so each draw has the same weight, even for a rare size. One
    process with batch size N * B sees the same samples as N processes with batch size B; and if all samples have one
    size, the order does not depend on the batch size.

    A later start draws all earlier batches again, which takes seconds for a million.

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
        known = Sizes.of(sizes)
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start = start
        self._codes = known.codes
        self._repeats = None if repeats is None else np.asarray(repeats, dtype=np.int32)
        self._counts = np.bincount(known.codes, self._repeats, len(known.kinds)).astype(np.int64)
        limits = dict.fromkeys(known.kinds, batch_size) if isinstance(batch_size, int) else batch_size
        drawn = zip(known.kinds, self._counts.tolist(), strict=True)
        # Some of the kinds may be of other samples alone.
        self._full = np.array([limits[size] * world_size if n else 1 for size, n in drawn], dtype=np.int64)

    def epoch(self, number: int) -> Numbers:
        """Return the order in which an epoch draws its samples."""
        # Half the memory of Python's own integers' type; the order is the same.
        order: Numbers = np.arange(len(self._codes), dtype=np.int32 if len(self._codes) < 2**31 else np.int64)
        order = order if self._repeats is None else np.repeat(order, self._repeats)
        np.random.default_rng((self.seed, number)).shuffle(order)
        return order

    def batches_per_epoch(self) -> float:
        """Return each rank's batches in an epoch, on average."""
        return sum(n / full for n, full in zip(self._counts.tolist(), self._full.tolist(), strict=True))

    def batches(self) -> Iterator[list[int]]:
        """Yield the batches of all ranks together, without end."""
        return (batch.tolist() for batch in self._batches())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        draw = 0
        for position, batch in enumerate(self._batches()):
            if position >= self.start:
                share = len(batch) // self.world_size
                mine = slice(self.rank * share, (self.rank + 1) * share)
                yield list(zip(batch[mine].tolist(), range(draw + mine.start, draw + mine.stop), strict=True))
            draw += len(batch)

    def _batches(self) -> Iterator[Numbers]:
        """Yield the batches of all ranks together, from the first epoch on."""
        waiting: dict[int, Numbers] = {}
        for number in count() if self._counts.any() else ():
            order = self.epoch(number)
            for first in range(0, len(order), BLOCK):
                yield from self._collect(order[first : first + BLOCK], waiting)

    def _collect(self, block: Numbers, waiting: dict[int, Numbers]) -> list[Numbers]:
        """Return the batches that some draws complete, in that order; the rest joins the waiting draws."""
        found: list[tuple[int, Numbers]] = []
        codes = self._codes[block]
        by_size = np.argsort(codes, kind="stable")
        sizes, first = np.unique(codes[by_size], return_index=True)
        for size, places in zip(sizes.tolist(), np.split(by_size, first[1:]), strict=True):
            mine, full = block[places], int(self._full[size])
            before = waiting.get(size, mine[:0])
            last = places[full - 1 - len(before) :: full].tolist()
            mine = np.concatenate([before, mine])
            found += [(place, mine[n * full : (n + 1) * full]) for n, place in enumerate(last)]
            waiting[size] = mine[len(last) * full :]
        return [batch for _, batch in sorted(found, key=itemgetter(0))]
