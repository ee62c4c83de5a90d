"""Batches of encoded samples, by random access into the tars of a local cache."""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from datamodules.batch import LatentBatch, stack_padded
from datamodules.files import reading
from datamodules.sampler import drawn_caption, drawn_preserved
from datamodules.shards.cache import REMEDY
from datamodules.shards.index import ShardIndex

# One batch of a sampler: for each sample its index and the index of the draw.
BatchEntry = list[tuple[int, int]]


@dataclass
class LatentReader:
    """Reads batches from the tars of a folder.

    Attributes:
        numbers: the samples' indices in the index.
        keys: the samples' names.
        empty_prompt: whether batches include the empty prompt's conditioning.
        captions: of each sample, if known.
        weights: of each sample in the loss; empty if all are 1.
        seed: draws one of a sample's captions and one of its preserved prompts; None for its first caption.
        preserved: for each sample's index, the rows of the prompts of which a batch contains one.
    """

    folder: Path
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
        batch = latent_batch(
            [self.keys[index] for index, _ in items],
            draws,
            [self._read(self.index.samples[4 * number]) for number in numbers],
            [self._read(own[caption]) for own, caption in zip(rows, drawn, strict=True)],
            [self._read_shared(row) for row in (empty[:1] if len(set(empty)) == 1 else empty)],
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
        path = self.folder / self.index.shards[shard]
        with reading(path, REMEDY), path.open("rb") as file:
            data = os.pread(file.fileno(), size, offset)
            if len(data) < size:
                raise EOFError("it ends too early")
            if zlib.crc32(data) != self.index.checksums[row]:
                raise ValueError("its bytes are not as they were written")
            return without_prefix(safetensors.torch.load(data))


def without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the empty prompt's tensors, which have names of their own in a tar, to those of a prompt."""
    return {name.removeprefix("empty_"): tensor for name, tensor in tensors.items()}


def latent_batch(
    keys: list[str],
    draws: list[int],
    samples: Sequence[Mapping[str, Tensor]],
    prompts: Sequence[Mapping[str, Tensor]],
    empty_prompts: Sequence[Mapping[str, Tensor]],
) -> LatentBatch:
    """Return the batch of some samples of one size.

    Args:
        empty_prompts: of each sample, or the one that all share; empty if batches do not include it.
    """
    tensors = stack_padded(samples)
    return LatentBatch(
        keys=keys,
        draws=draws,
        target_mean=tensors["target_mean"],
        target_std=tensors.get("target_std"),
        controls=[tensors[f"control_{number}"] for number in range(len(tensors)) if f"control_{number}" in tensors],
        prompt=stack_padded(prompts),
        empty_prompt=stack_padded(empty_prompts) if empty_prompts else {},
        mask=tensors["mask"].float() / 255 if "mask" in tensors else None,
        rejected_mean=tensors.get("rejected_mean"),
        rejected_std=tensors.get("rejected_std"),
    )
