"""The sizes of many samples, stored as small codes."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.integer[Any]]]


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
