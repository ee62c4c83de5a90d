"""The samples of a run: those to train on, and the held-out ones."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from datamodules.images.resizing import Size, View
from datamodules.images.samples import Sample
from datamodules.shards.reader import EncodedSample


class Split:
    """Samples with their views in order.

    Args:
        views: views of each sample; empty if only the shards of a cache are known.
        encoded: each view in a cache; empty if none is open.

    Attributes:
        keys, sizes: key and size of each view.
        leading: index of each sample's first view.
    """

    def __init__(self, views: Sequence[Sequence[View]] = (), encoded: Sequence[EncodedSample] = ()) -> None:
        self.views = [view for one in views for view in one]
        self.encoded = encoded
        self.keys = [view.sample.key for view in self.views] or [one.key for one in encoded]
        self.sizes: list[Size] = [one.size for one in self.views or encoded]
        leading = [index for index, one in enumerate(encoded) if one.is_first]
        self.leading = [0, *accumulate(map(len, views))][:-1] if views else leading

    def __len__(self) -> int:
        return len(self.leading)

    @property
    def samples(self) -> list[Sample]:
        """The samples; empty if only the shards of a cache are known."""
        return [self.views[index].sample for index in self.leading] if self.views else []

    @property
    def captions(self) -> list[str]:
        """Captions of the samples; empty if only the shards of a cache are known."""
        return [prompt for sample in self.samples for prompt in sample.prompts]

    @property
    def repeats(self) -> list[int]:
        """Number of times that an epoch draws each view."""
        return [view.repeats for view in self.views] or [1] * len(self.sizes)

    @property
    def noun(self) -> str:
        edits = {len(images) > 1 for images, _ in self.sizes}
        return "samples" if len(edits) > 1 else "pairs" if True in edits else "images"

    def size_counts(self) -> list[tuple[tuple[int, int], int]]:
        """Return the (width, height) of targets with their numbers, the most frequent first."""
        return Counter(images[0] for images, _ in self.sizes).most_common()

    def first(self) -> "Split":
        """Return the first view of the first sample."""
        return Split([self.views[:1]] if self.views else [], self.encoded[:1])
