"""The sizes of many samples, each kept as a small number."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Sizes(Sequence[Any]):
    """What stands for each sample is one of a few kinds: a list of ten million takes 10 or 20 MB.

    Args:
        kinds: all different.
        codes: for each sample the number of its kind.
    """

    def __init__(self, kinds: Sequence[Hashable], codes: Numbers | Sequence[int]) -> None:
        self.kinds: list[Any] = list(kinds)
        self.codes = np.asarray(codes, dtype=np.min_scalar_type(len(self.kinds)))

    @classmethod
    def of(cls, sizes: Iterable[Hashable]) -> "Sizes":
        """Those of a list; the kinds in the order in which they come."""
        if isinstance(sizes, Sizes):
            return sizes
        known: dict[Hashable, int] = {}
        codes = np.fromiter((known.setdefault(size, len(known)) for size in sizes), dtype=np.int32)
        return cls(list(known), codes)

    def take(self, numbers: Numbers | Sequence[int]) -> "Sizes":
        """Those of the samples with these numbers."""
        return Sizes(self.kinds, self.codes[np.asarray(numbers, dtype=np.intp)])

    def counts(self) -> Counter[Any]:
        """How many samples there are of each."""
        found = np.bincount(self.codes, minlength=len(self.kinds)).tolist()
        return Counter({kind: count for kind, count in zip(self.kinds, found, strict=True) if count})

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, number: Any) -> Any:
        return self.kinds[self.codes[number]]

    def __iter__(self) -> Iterator[Any]:
        return map(self.kinds.__getitem__, self.codes.data)
