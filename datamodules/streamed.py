"""Cached latents that are streamed from remote shards."""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datamodules.base import Example, PromptShapes, TrainingData, model_of
from datamodules.batch import LatentBatch, RawBatch
from datamodules.errors import count_of, without_credentials
from datamodules.prefetch import ThreadedLoader
from datamodules.sampler import samples_per_batch
from datamodules.shards.fingerprint import FINGERPRINT, check_fit, check_preserved, fingerprint, fingerprint_parts
from datamodules.shards.stream import RemoteShard, ShardStream, collate, find_shards, read_items

# Samples that each worker buffers to shuffle them: 1.3 GB for Qwen-Image-Edit. More would delay the first step, which
# waits until the buffer is full.
SHUFFLE_BUFFER = 64


class StreamedDataModule(TrainingData):
    """The samples of a cache at a URL.

    Args:
        shards: the URL, in which FINGERPRINT is replaced by the run's own fingerprint.
        batch_size, max_tokens_per_batch, num_workers, caption_dropout_rate, seed: as for `CachedDataModule`.
        memo: see `Fingerprinted.fingerprint_parts`.
    """

    needs_encoders = False

    def __init__(
        self,
        shards: str,
        batch_size: int,
        max_tokens_per_batch: int | None,
        num_workers: int,
        caption_dropout_rate: float,
        seed: int,
        memo: Path,
    ) -> None:
        super().__init__()
        self.validation = None  # a stream has no samples to hold out
        self.url = shards
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_workers = num_workers
        self.caption_dropout_rate = caption_dropout_rate
        self.seed = seed
        self.memo = memo
        self.notes = []
        self.shards: list[RemoteShard] = []
        self.manifest: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        model = model_of(self.run)
        self.serve(model.objective)
        parts = fingerprint_parts(model, self.memo)
        self.url = self.url.replace(FINGERPRINT, fingerprint(parts))
        where = f"data.shards={without_credentials(self.url)}"
        check_preserved(self.preserve_prompts, where)
        self.shards, self.manifest = find_shards(self.url)
        check_fit(self.manifest["parts"], parts, where)
        self.encodings = self.memo.parent / fingerprint(parts)

    def train_batches(self) -> ThreadedLoader:
        trainer = self.run
        stream = ShardStream(
            self.shards,
            partial(samples_per_batch, self.batch_size, self.max_tokens_per_batch),
            SHUFFLE_BUFFER,
            self.seed,
            trainer.global_rank,
            trainer.world_size,
            start=trainer.global_step * trainer.accumulate_grad_batches,
            empty_prompt=self.with_empty_prompt,
            stride=self.max_tokens_per_batch or self.batch_size,
            preserve_empty=bool(self.preserve_prompts),
        )
        workers = max(1, self.num_workers)
        return ThreadedLoader(partial(stream.jobs, workers), self.num_workers, ahead=workers - 1)

    def one_by_one(self, which: slice, empty_prompt: bool) -> Iterator[LatentBatch]:
        items = itertools.chain.from_iterable(read_items(shard, empty_prompt) for shard in self.shards)
        return (collate([item], [0], None) for _, item in itertools.islice(items, which.start, which.stop, which.step))

    def pixels(self, count: int) -> list[RawBatch]:
        return []

    def examples(self, which: slice, negative_prompt: str | None) -> list[Example]:
        return [Example([], batch) for batch in self.one_by_one(which, negative_prompt is not None)]

    def describe(self) -> str:
        shards = count_of(len(self.shards), "shards")
        return f"{count_of(self.sample_count, 'samples')} in {shards}, streamed from {without_credentials(self.url)}"

    @property
    def sample_count(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def identities(self) -> Iterator[object]:
        return ((shard.samples, shard.prompts) for shard in self.shards)

    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        return False  # not known

    def size_counts(self) -> Counter[tuple[int, int]]:
        sizes = {name: name.split("x") for name in self.manifest["sizes"]}
        return Counter({(int(w), int(h)): self.manifest["sizes"][name] for name, (w, h) in sizes.items()})

    def batches_per_epoch(self) -> float:
        tokens = self.manifest["tokens"] / self.manifest["samples"]
        limit = samples_per_batch(self.batch_size, self.max_tokens_per_batch, tokens)
        return self.sample_count / limit / self.run.world_size
