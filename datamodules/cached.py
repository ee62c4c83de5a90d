"""Cached latents: training without running the encoders."""

from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.base import Example, Model, PromptShapes, model_of
from datamodules.batch import LatentBatch
from datamodules.contents import look_up
from datamodules.errors import UserError, listing, without_credentials
from datamodules.images.resizing import Size, View
from datamodules.images.windows import Window
from datamodules.pairs import PairsDataModule
from datamodules.prefetch import ThreadedLoader
from datamodules.sampler import samples_per_batch
from datamodules.shards.cache import Cache, Folder, open_cache
from datamodules.shards.fingerprint import FINGERPRINT, check_preserved, fingerprint, fingerprint_parts, memo
from datamodules.shards.index import ShardIndex, hold_out, open_shards
from datamodules.shards.reader import LatentReader
from datamodules.shards.transfer import Bucket


def cached(shards: str | None, **settings: Any) -> PairsDataModule:
    """Return the data module for `data=cached` and `data=captions`.

    Without a cache_dir samples are encoded in every step, as with `data=pairs`.

    Args:
        shards: None for the samples of data.root; else the folder or URL of a cache.
        settings: of `CachedDataModule`.
    """
    if shards is not None:
        where = f"data.shards={without_credentials(shards)}"
        if settings["root"] is not None:
            raise UserError(f"{where} and data.root={settings['root']}: both are set. Leave one out.")
    if settings["cache_dir"] is None:
        if shards is not None or settings["max_tokens_per_batch"] is not None:
            raise UserError("data.shards and data.max_tokens_per_batch need cached latents. Set data.cache_dir.")
        for name in ("cache_dir", "max_tokens_per_batch"):
            del settings[name]
        return PairsDataModule(**settings)
    return CachedDataModule(shards=shards, **settings)


class CachedDataModule(PairsDataModule):
    """Encoded samples in shards: those of data.root, or all of a cache.

    Args:
        cache_dir: contains a folder for each fingerprint. A cache in a bucket is filled, but never read from here.
        shards: the folder or URL of a cache, instead of data.root. FINGERPRINT in it is replaced by the run's own
            fingerprint. Only the index is read in advance.
        max_tokens_per_batch: instead of batch_size, the most tokens of a batch: large images come in small batches,
            small ones in large.
        settings: of `PairsDataModule`.
    """

    needs_encoders = False

    def __init__(self, cache_dir: str, shards: str | None, max_tokens_per_batch: int | None, **settings: Any) -> None:
        super().__init__(max_tokens_per_batch=max_tokens_per_batch, **settings)
        self.cache_dir = cache_dir
        self.shards = shards
        self.index = ShardIndex([])
        self.numbers: Sequence[int] = []
        self._number_of: dict[tuple[str, tuple[Window, ...]], int] = {}
        self._preserved: dict[int, tuple[int, ...]] = {}
        self.source: Folder | Bucket = Folder(Path())

    def cache(self, model: Model) -> Cache:
        """Return the cache for this model's encodings."""
        parts = fingerprint_parts(model, memo(self.cache_dir))
        return open_cache(self.cache_dir, fingerprint(parts), parts)

    def setup(self, stage: str) -> None:
        model = model_of(self.run)
        self.configure_for(model)
        self.open(self.cache(model))
        self.note_buckets()

    def open(self, cache: Cache) -> None:
        """Find the samples in the cache, which must contain all of data.root, or in data.shards."""
        self.encodings = cache.folder
        if self.shards is None:
            self.source = Folder(cache.folder)
            self._open_root(cache)
        else:
            self._open_shards(self.shards.replace(FINGERPRINT, cache.folder.name), cache)
        for number, rows in self._preserved.items():
            lengths = self.index.text_tokens
            own = max(lengths[row] for row in self.index.prompts_of(number))
            self.index.tokens[number] += max(0, max((lengths[row] for row in rows), default=0) - own)
        budget = self.max_tokens_per_batch
        if budget and (above := sum(self.index.tokens[number] > budget for number in self.numbers)):
            what = f"{above} samples have more tokens than data.max_tokens_per_batch={budget}"
            self.notes.append(f"{what}: each is a batch of its own")

    def _open_root(self, cache: Cache) -> None:
        """Use the samples of data.root."""
        hashes, samples = cache.file_hashes(), self.sample_set.find()
        found = look_up(self.sample_set, samples.samples, cache, hashes, self.preserve_prompts)
        self.index, self._number_of, self._preserved = found.index, found.numbers, found.preserved
        changed, notes = self.sample_set.check(found.missing)
        self.notes = [*samples.notes, *notes]
        if changed:
            absent = listing([one.sample.key for one in changed])
            hint = "Fill it from a machine that may write to it."
            if cache.touch():
                hint = "If files have just changed, start again. Several machines need a shared disk, or data.shards."
            raise UserError(f"{absent} not in the cache {cache}. {hint}")
        self.take(found.usable, hashes.get)

    def _open_shards(self, url: str, wanted: Cache) -> None:
        """Use all samples of a cache."""
        if self.sample_set.val_roots:
            raise UserError("data.val_root needs data.root. To hold out samples of data.shards, set data.val_count.")
        path = Path(url).expanduser()
        self.source = Folder(path) if path.is_dir() else Bucket(url, "data.shards", writes=False)
        check_preserved(self.preserve_prompts, f"data.shards={self.source}")
        self.index = open_shards(self.source, wanted.parts)
        held, numbers = hold_out(self.index, self.val_count)
        if self.preserve_prompts:
            self._preserved = {number: (self.index.empty_prompt_of(number),) for number in self.index.numbers}
        self.validation = None
        if held:
            held_out = copy(self)
            held_out.use_numbers(held)
            self.validation = held_out
        self.use_numbers(numbers)

    def use_numbers(self, numbers: Sequence[int]) -> None:
        """Train on these samples of the index, whose images are not known."""
        self.numbers = array("i", numbers)
        self.keys = [self.index.keys[number] for number in numbers]
        self.sizes = self.index.sizes.take(self.numbers)
        self.leading = array("i", (place for place, number in enumerate(numbers) if self.index.is_first[number]))

    def keep_first(self) -> None:
        if self.views:
            super().keep_first()
        else:
            self.use_numbers(self.numbers[:1])

    def use(self, views: Sequence[Sequence[View]]) -> None:
        super().use(views)
        # Empty if the images were scanned without opening the cache.
        known = self._number_of
        self.numbers = [known[view.sample.key, view.windows] for view in self.views] if known else []

    def batch_limits(self) -> dict[Size, int]:
        tokens = np.ones(len(self.sizes.kinds), dtype=np.int64)
        np.maximum.at(tokens, self.sizes.codes, np.array(self.index.tokens)[np.array(self.numbers, np.intp)])
        of_batch = partial(samples_per_batch, self.batch_size, self.max_tokens_per_batch)
        return {size: of_batch(count) for size, count in zip(self.sizes.kinds, tokens.tolist(), strict=True)}

    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        rows = {row for number in self.numbers for row in (*self.index.prompts_of(number), *self._more_rows(number))}
        lengths = {self.index.text_tokens[row] for row in rows}
        return len(lengths) == 1 and len(set(self.sizes)) == 1

    def _more_rows(self, number: int) -> Sequence[int]:
        """Return the rows of the prompts that a batch contains alongside a sample's own."""
        empty = [self.index.empty_prompt_of(number)] if self.with_empty_prompt else []
        return [*self._preserved.get(number, ()), *empty]

    def reader(self, empty_prompt: bool, seed: int | None = None) -> LatentReader:
        """Return a reader of batches.

        Args:
            empty_prompt: whether they include the empty prompt's conditioning.
            seed: draws the captions and the preserved prompts; None for the first captions.
        """
        captions = [view.sample.prompts for view in self.views]
        weights = [view.weight for view in self.views]
        if all(weight == 1 for weight in weights):
            weights = []
        where = self.source, self.index, self.numbers, self.keys
        return LatentReader(*where, empty_prompt, captions, weights, seed, self._preserved)

    def train_batches(self) -> ThreadedLoader:
        return ThreadedLoader(self.reader(self.with_empty_prompt, self.seed), self.sampler(), self.num_workers)

    def examples(self, which: slice, negative_prompt: str | None) -> list[Example]:
        if self.samples and negative_prompt:
            return super().examples(which, negative_prompt)
        batches = self.one_by_one(which, negative_prompt is not None)
        if not self.samples:
            return [Example([], batch) for batch in batches]
        return [Example(raw.images, batch) for raw, batch in zip(self.raw_one_by_one(which), batches, strict=True)]

    def one_by_one(self, which: slice, empty_prompt: bool) -> Iterator[LatentBatch]:
        reader = self.reader(empty_prompt)
        return (reader([(index, 0)]) for index in self.leading[which])

    @property
    def origin(self) -> str:
        if self.shards is not None:
            return str(self.source)
        return super().origin + (f", encoded in {self.source}" if self.numbers else "")
