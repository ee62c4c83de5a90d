"""Batches of encoded samples, by random access into the tars of a cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import safetensors.torch
import torch
from torch import Tensor

from datamodules.batch import LatentBatch, stack_padded
from datamodules.files import reading
from datamodules.sampler import drawn_caption, drawn_preserved
from datamodules.shards.cache import REMEDY, Folder
from datamodules.shards.index import ShardIndex
from datamodules.shards.transfer import Bucket

# One batch of a sampler: for each sample its index and the index of the draw.
BatchEntry = list[tuple[int, int]]


@dataclass
class LatentReader:
    """Reads batches from the tars of a folder or bucket.

    Attributes:
        numbers: the samples' indices in the index.
        keys: the samples' names.
        empty_prompt: whether batches include the empty prompt's conditioning.
        captions: of each sample, if known.
        weights: of each sample in the loss; empty if all are 1.
        seed: draws one of a sample's captions and one of its preserved prompts; None for its first caption.
        preserved: for each sample's index, the rows of the prompts of which a batch contains one.
    """

    source: Folder | Bucket
    index: ShardIndex
    numbers: Sequence[int]
    keys: Sequence[str]
    empty_prompt: bool
    captions: Sequence[Sequence[str]] = ()
    weights: Sequence[float] = ()
    seed: int | None = None
    preserved: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read_shared = lru_cache(maxsize=8)(self._read)

    def __call__(self, items: BatchEntry) -> LatentBatch:
        """Return the batch of these samples, which must be of one size."""
        numbers = [self.numbers[index] for index, _ in items]
        draws = [draw for _, draw in items]
        rows = [self.index.prompts_of(number) for number in numbers]
        drawn = [drawn_caption(self.seed, draw, len(own)) for draw, own in zip(draws, rows, strict=True)]
        empty = [self.index.empty_prompt_of(number) for number in numbers] if self.empty_prompt else []
        empty = empty[:1] if len(set(empty)) == 1 else empty
        tensors = stack_padded([self._read(self.index.samples[4 * number]) for number in numbers])
        batch = LatentBatch(
            keys=[self.keys[index] for index, _ in items],
            draws=draws,
            target_mean=tensors["target_mean"],
            target_std=tensors.get("target_std"),
            controls=[tensors[f"control_{place}"] for place in range(len(tensors)) if f"control_{place}" in tensors],
            prompt=stack_padded([self._read(own[caption]) for own, caption in zip(rows, drawn, strict=True)]),
            empty_prompt=stack_padded([self._read_shared(row) for row in empty]) if empty else {},
            mask=tensors["mask"].float() / 255 if "mask" in tensors else None,
            rejected_mean=tensors.get("rejected_mean"),
            rejected_std=tensors.get("rejected_std"),
        )
        if self.captions:
            batch.prompts = [self.captions[index][caption] for (index, _), caption in zip(items, drawn, strict=True)]
        if self.preserved and self.seed is not None:
            chosen = [(self.preserved[number], draw) for number, draw in zip(numbers, draws, strict=True)]
            preserved = [self._read(own[drawn_preserved(self.seed, draw, len(own))]) for own, draw in chosen]
            batch.preserve_prompt = stack_padded(preserved)
        if self.weights:
            batch.weights = torch.tensor([self.weights[index] for index, _ in items])
        return batch

    def _read(self, row: int) -> dict[str, Tensor]:
        """Return the tensors of a row; raises a UserError if they are not as they were written."""
        shard, offset, size = self.index.spans[3 * row : 3 * row + 3]
        name = self.index.shards[shard]
        data = self.source.read_range(name, offset, size, self.index.checksums[row])
        with reading(f"{self.source}/{name}", REMEDY):
            tensors = safetensors.torch.load(data)
        # The empty prompt's tensors have names of their own in a tar.
        return {name.removeprefix("empty_"): tensor for name, tensor in tensors.items()}
