"""Cached latents: training without running the encoders."""

import time
from array import array
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datamodules.base import Example, Model, PromptShapes, model_of
from datamodules.batch import LatentBatch
from datamodules.contents import look_up
from datamodules.errors import UserError, count_of, listing
from datamodules.images.framing import Size, View
from datamodules.images.windows import Window
from datamodules.pairs import PairsDataModule
from datamodules.sampler import samples_per_batch
from datamodules.shards.bucket_cache import cache_of
from datamodules.shards.cache import Cache
from datamodules.shards.copied import check_preserved, hold_out, open_copied
from datamodules.shards.failures import shown
from datamodules.shards.fingerprint import fingerprint, fingerprint_parts, memo
from datamodules.shards.index import ShardIndex
from datamodules.shards.reader import LatentReader, Tars, ThreadedLoader

if TYPE_CHECKING:
    from datamodules.streamed import StreamedDataModule


# Settings that change what is encoded, and what they are where they change nothing.
PICTURES_ALONE = {
    **{"buckets": "auto", "upscale": False, "crop": "center", "crop_count": 4, "flip": False},
    **{"prefix": "", "trigger_word": None, "columns": None, "pair_suffixes": None},
    **{"caption_per_line": True, "alpha_mask": False},
}


def cached(shards: str | None, **settings: Any) -> "PairsDataModule | StreamedDataModule":
    """The data module for `data=cached` and `data=captions`.

    Without a cache_dir samples are encoded in every step, as with `data=pairs`.

    Args:
        shards: None for the samples of data.root; else the folder of a cache, or the URL of one, which is streamed.
        settings: of `CachedDataModule`.
    """
    if shards is not None and settings["root"] is not None:
        raise UserError(
            f"data.shards={shown(shards)} and data.root={settings['root']}: train on one, leave the other out"
        )
    if shards is not None:
        for name, plain in PICTURES_ALONE.items():
            if settings[name] != plain:
                raise UserError(
                    f"data.{name}={settings[name]} is about pictures, and data.shards={shown(shards)} holds what is "
                    "encoded: leave it out, or encode data.root with it"
                )
    if settings["cache_dir"] is None:
        if shards is not None or settings["max_tokens_per_batch"] is not None:
            raise UserError("data.shards and data.max_tokens_per_batch need cached latents: set data.cache_dir too")
        for name in ("cache_dir", "shard_size", "max_tokens_per_batch"):
            del settings[name]
        return PairsDataModule(**settings)
    if shards is None or Path(shards).expanduser().is_dir():
        return CachedDataModule(shards=shards, **settings)
    if settings["val_root"] is not None or settings["val_count"]:
        raise UserError(
            f"data.shards={shown(shards)} is streamed, and no samples of a stream can be held out: leave data.val_root "
            "and data.val_count out"
        )
    from datamodules.streamed import StreamedDataModule

    shared = ("batch_size", "max_tokens_per_batch", "num_workers", "caption_dropout_rate", "seed")
    return StreamedDataModule(
        shards=shards,
        memo=memo(settings["cache_dir"]),
        **{name: settings[name] for name in shared},
    )


class CachedDataModule(PairsDataModule):
    """Encoded samples in shards on this machine: those of data.root, or all that a folder holds.

    Args:
        cache_dir: holds a folder for each fingerprint. One in a bucket is filled, but never read from.
        shards: the folder of a cache, instead of data.root.
        max_tokens_per_batch: instead of batch_size, the most tokens that the transformer sees at once: large pictures
            come in small batches, small ones in large.
        shard_size: bytes at which a new tar is begun.
        settings: of `PairsDataModule`.
    """

    needs_encoders = False

    def __init__(
        self,
        cache_dir: str,
        shards: str | None,
        max_tokens_per_batch: int | None,
        shard_size: int,
        **settings: Any,
    ) -> None:
        super().__init__(max_tokens_per_batch=max_tokens_per_batch, **settings)
        self.cache_dir = cache_dir
        self.shards = shards
        self.shard_size = shard_size
        self.index = ShardIndex([])
        self.numbers: Sequence[int] = []
        self._number_of: dict[tuple[str, tuple[Window, ...]], int] = {}
        self._preserved: dict[int, tuple[int, ...]] = {}
        self.encoded: Cache | None = None
        self.tars = Tars(Path())

    def cache(self, model: Model) -> Cache:
        """The cache of what this model encodes."""
        parts = fingerprint_parts(model, memo(self.cache_dir))
        return cache_of(self.cache_dir, fingerprint(parts), parts)

    def configure_for(self, model: Model) -> None:
        super().configure_for(model)
        self._text = model.geometry.text

    def setup(self, stage: str) -> None:
        model = model_of(self.run)
        self.configure_for(model)
        self.open(self.cache(model))
        self.note_buckets()

    def open(self, cache: Cache) -> None:
        """Find the samples in the cache; of data.root it must have all."""
        self.encodings = cache.folder
        self.encoded = cache if self.shards is None else Cache(Path(self.shards).expanduser(), {})
        self.tars = Tars(self.encoded.folder)
        if self.shards is not None:
            self._take_folder(self.encoded.folder, cache)
        else:
            try:
                self._take_root(cache)
            except FileNotFoundError:  # another build has just merged its rows into the index
                time.sleep(1)
                self._take_root(cache)
        budget = self.max_tokens_per_batch
        read = self.reader(False)
        for number in self._preserved if budget else ():
            self.index.tokens[number] = read.most_tokens(number, self._text)
        if budget and (above := sum(self.index.tokens[number] > budget for number in self.numbers)):
            what = f"{above} samples have more tokens than data.max_tokens_per_batch={budget}"
            self.notes.append(f"{what}: each is a batch of its own")

    def _take_root(self, cache: Cache) -> None:
        """Use the samples of data.root."""
        hashes, samples = cache.checksums.known(), self.sample_set.find()
        found = look_up(self.sample_set, samples.samples, cache, hashes, self.preserve_prompts)
        self.index, self._number_of, self._preserved = found.index, found.numbers, found.preserved
        changed, notes = self.sample_set.check(found.missing)
        self.notes = [*samples.notes, *notes]
        if changed:
            absent = listing([one.sample.key for one in changed])
            hint = "fill it from where it can be written"
            if cache.touch():
                hint = "did files change just now? Start again; machines need a disk in common, or data.shards=s3://..."
            raise UserError(f"{absent} not in the cache {cache}: {hint}")
        self.sample_set.require_some(found.usable)
        self.take(found.usable, hashes.get)

    def _take_folder(self, folder: Path, wanted: Cache) -> None:
        """Use all samples of a cache."""
        if self.sample_set.val_roots:
            raise UserError("data.val_root needs data.root; to hold out samples of data.shards, set data.val_count")
        self.index = open_copied(folder, wanted.parts)
        check_preserved(self.preserve_prompts, f"data.shards={folder}")
        held, numbers = hold_out(self.index, self.val_count)
        if self.preserve_prompts:
            self._preserved = {number: (self.index.empty_prompt_of(number),) for number in self.index.numbers}
        self.validation = None
        if held:
            self.validation = copy(self)
            self.validation.use_numbers(held)
        self.use_numbers(numbers)

    def use_numbers(self, numbers: Sequence[int]) -> None:
        """Train on these samples of the index, of which only the shards are known."""
        self.numbers = array("i", numbers)
        self.keys = self.index.keys.take(self.numbers)
        self.sizes = self.index.sizes.take(self.numbers)
        self.leading = array("i", (place for place, number in enumerate(numbers) if self.index.is_first[number]))

    def keep_first(self) -> None:
        if self.views:
            super().keep_first()
        else:
            self.use_numbers(self.numbers[:1])

    def use(self, views: Sequence[Sequence[View]]) -> None:
        super().use(views)
        # Empty if the pictures were scanned without opening the cache.
        known = self._number_of
        self.numbers = [known[view.sample.key, view.windows] for view in self.views] if known else []

    def batch_limits(self) -> dict[Size, int]:
        tokens = np.ones(len(self.sizes.kinds), dtype=np.int64)
        np.maximum.at(tokens, self.sizes.codes, np.array(self.index.tokens)[np.array(self.numbers, np.intp)])
        of_batch = partial(samples_per_batch, self.batch_size, self.max_tokens_per_batch)
        return {size: of_batch(count) for size, count in zip(self.sizes.kinds, tokens.tolist(), strict=True)}

    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        shapes = set(map(self.index.shapes, self.numbers))
        prompt_sizes = {size for *_, sizes in shapes for size in sizes}
        return len(shapes) == 1 and len(prompt_sizes) == 1 and self.reader(self.with_empty_prompt).others_fit()

    def reader(self, empty_prompt: bool, seed: int | None = None) -> LatentReader:
        """Reads batches.

        Args:
            empty_prompt: whether they include the empty prompt's conditioning.
            seed: draws the captions and the preserved prompts; None for the first captions alone.
        """
        captions = [view.sample.prompts for view in self.views]
        weights = [view.weight for view in self.views]
        if all(weight == 1 for weight in weights):
            weights = []
        where = self.tars, self.index, self.numbers, self.keys
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

    def describe(self) -> str:
        if self.shards is None:
            return super().describe() + (f", encoded in {self.encoded}" if self.numbers else "")
        held_out = "" if self.validation is None else f", {self.validation.sample_count} held out"
        views = "" if len(self.numbers) == self.sample_count else f" in {count_of(len(self.numbers), 'views')}"
        return f"{count_of(self.sample_count, 'samples')}{views} of {self.encoded}{held_out}"
