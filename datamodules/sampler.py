"""Batches of samples of one size, without end; any position of the order can be computed directly."""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain, count
from operator import itemgetter
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from datamodules.sizes import Numbers, Sizes

# Separate the randomness of captions and of preserved prompts from that of the order.
CAPTIONS, PRESERVED = 0x63617074, 0x6B656570
# Draws that are collected into batches at once.
BLOCK = 2**16


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

    Starting at a later batch takes about as long as drawing an epoch's order: the number of samples of each size that
    were drawn before, and so the number that waits, follows from counts; the last orders contain the waiting ones.

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
        self._counts = np.zeros(len(known.kinds), dtype=np.int64)
        for block in _blocks(self._once()):
            self._counts += self._count(block)
        limits = dict.fromkeys(known.kinds, batch_size) if isinstance(batch_size, int) else batch_size
        drawn = zip(known.kinds, self._counts.tolist(), strict=True)
        # Some of the kinds may be of other samples alone.
        self._full = np.array([limits[size] * world_size if n else 1 for size, n in drawn], dtype=np.int64)

    def _once(self) -> Numbers:
        """Return the samples of an epoch, not shuffled."""
        # Half the memory of Python's own integers' type; the order is the same.
        indices: Numbers = np.arange(len(self._codes), dtype=np.int32 if len(self._codes) < 2**31 else np.int64)
        return indices if self._repeats is None else np.repeat(indices, self._repeats)

    def epoch(self, number: int) -> Numbers:
        """Return the order in which an epoch draws its samples."""
        order = self._once()
        np.random.default_rng((self.seed, number)).shuffle(order)
        return order

    def batches_per_epoch(self) -> float:
        """Return each rank's batches in an epoch, on average."""
        return sum(n / full for n, full in zip(self._counts.tolist(), self._full.tolist(), strict=True))

    def batches(self) -> Iterator[list[int]]:
        """Yield the batches of all ranks together, without end."""
        return (batch for _, batch in self._batches_from(0))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for draw, batch in self._batches_from(self.start):
            share = len(batch) // self.world_size
            mine = range(self.rank * share, (self.rank + 1) * share)
            yield [(batch[i], draw + i) for i in mine]

    def _batches_from(self, start: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the batches of all ranks from this position on, each with the index of its first draw."""
        if not self._counts.any():
            return
        number = self._epoch_of(start)
        drawn, passed, blocks = number * self._counts, 0, _blocks(self.epoch(number))
        while self._complete(after := drawn + self._count(blocks[passed])) <= start:
            drawn, passed = after, passed + 1
        waiting = self._waiting(drawn, chain(reversed(blocks[:passed]), self._blocks_before(number)))
        position, draw = self._complete(drawn), int((drawn // self._full * self._full).sum())
        ahead = chain(blocks[passed:], self._blocks_after(number))
        del blocks  # else this epoch's order would stay in memory
        for block in ahead:
            for batch in self._collect(block, waiting):
                if position >= start:
                    yield draw, batch.tolist()
                position += 1
                draw += len(batch)

    def _epoch_of(self, position: int) -> int:
        """Return the epoch whose draws complete the batch at a position."""
        most = int((position + len(self._full)) / self.batches_per_epoch()) + 2
        return bisect_right(range(1, most), position, key=lambda epochs: self._complete(epochs * self._counts))

    def _complete(self, drawn: Numbers) -> int:
        """Return how many batches these numbers of draws of each size make."""
        return int((drawn // self._full).sum())

    def _count(self, block: Numbers) -> Numbers:
        """Return the number of these draws of each size."""
        return np.bincount(self._codes[block], minlength=len(self._counts))

    def _blocks_after(self, number: int) -> Iterator[Numbers]:
        return chain.from_iterable(_blocks(self.epoch(later)) for later in count(number + 1))

    def _blocks_before(self, number: int) -> Iterator[Numbers]:
        """Yield the blocks of the earlier epochs, the last one first."""
        return chain.from_iterable(reversed(_blocks(self.epoch(earlier))) for earlier in reversed(range(number)))

    def _by_size(self, block: Numbers) -> Iterator[tuple[int, Numbers]]:
        """Return the sizes of some draws, each with their positions among these, in order."""
        codes = self._codes[block]
        places = np.argsort(codes, kind="stable")
        present, first = np.unique(codes[places], return_index=True)
        return zip(present.tolist(), np.split(places, first[1:]), strict=True)

    def _waiting(self, drawn: Numbers, backwards: Iterator[Numbers]) -> dict[int, Numbers]:
        """Return by size the last draws that no batch contains yet.

        Args:
            drawn: the number of draws of each size.
            backwards: the draws in blocks, the last one first.
        """
        missing = drawn % self._full
        parts: dict[int, list[Numbers]] = {}
        while missing.any():
            block = next(backwards)
            for size, places in self._by_size(block):
                if missing[size]:
                    parts.setdefault(size, []).append(block[places[-missing[size] :]])
                    missing[size] -= len(parts[size][-1])
        return {size: np.concatenate(found[::-1]) for size, found in parts.items()}

    def _collect(self, block: Numbers, waiting: dict[int, Numbers]) -> list[Numbers]:
        """Return the batches that some draws complete, in that order; the rest joins the waiting draws."""
        found: list[tuple[int, Numbers]] = []
        for size, places in self._by_size(block):
            mine, full = block[places], int(self._full[size])
            before = waiting.get(size, mine[:0])
            last = places[full - 1 - len(before) :: full].tolist()
            mine = np.concatenate([before, mine])
            found += [(place, mine[n * full : (n + 1) * full]) for n, place in enumerate(last)]
            waiting[size] = mine[len(last) * full :]
        return [batch for _, batch in sorted(found, key=itemgetter(0))]


def _blocks(order: Numbers) -> list[Numbers]:
    return [order[first : first + BLOCK] for first in range(0, len(order), BLOCK)]
