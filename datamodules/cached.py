"""Cached latents: training without running the encoders."""

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from datamodules.base import Model, PromptShapes, model_of
from datamodules.batch import LatentBatch
from datamodules.contents import look_up
from datamodules.images.resizing import Size, View
from datamodules.images.windows import Window
from datamodules.pairs import PairsDataModule
from datamodules.prefetch import ThreadedLoader
from datamodules.sampler import FIRST, Choices, samples_per_batch
from datamodules.shards.cache import FINGERPRINT, Cache, Folder, open_cache
from datamodules.shards.reader import EncodedSample, LatentReader, hold_out, open_shards
from datamodules.shards.transfer import Bucket
from foundation.errors import UserError, listing, without_credentials
from foundation.stores import working_folder


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

    Attributes:
        encoded: each view in the cache; empty if the images were scanned without opening it.
    """

    needs_encoders = False

    def __init__(self, cache_dir: str, shards: str | None, max_tokens_per_batch: int | None, **settings: Any) -> None:
        super().__init__(max_tokens_per_batch=max_tokens_per_batch, **settings)
        self.cache_dir = cache_dir
        self.shards = shards
        self.encoded: list[EncodedSample] = []
        self._encoded_views: dict[tuple[str, tuple[Window, ...]], EncodedSample] = {}
        self.source: Folder | Bucket = Folder(Path())

    def cache(self, model: Model) -> Cache:
        """Return the cache for this model's encodings."""
        memo = working_folder(self.cache_dir) / "models.jsonl"
        return open_cache(self.cache_dir, model.encoder.fingerprint_parts(memo))

    def configure_for(self, model: Model) -> None:
        super().configure_for(model)
        if (rate := self.choices.reference_dropout) and model.condition_images.text_sees_them:
            raise UserError(
                f"data.reference_dropout={rate:g}: the text encoder of {model.base.name} sees the condition images, so "
                "a cache does not contain its outputs without them. Set data.cache_dir=null to encode in every step."
            )

    def setup(self, stage: str) -> None:
        model = model_of(self.run)
        self.configure_for(model)
        self.open(self.cache(model))
        self.note_buckets()

    def open(self, cache: Cache) -> None:
        """Find the samples in the cache, which must contain all of data.root, or in data.shards."""
        if self.shards is None:
            self.source = Folder(cache.folder)
            self._open_root(cache)
        else:
            self._open_shards(self.shards.replace(FINGERPRINT, cache.folder.name), cache)
        budget = self.max_tokens_per_batch
        if budget and (above := sum(sample.tokens > budget for sample in self.encoded)):
            what = f"{above} samples have more tokens than data.max_tokens_per_batch={budget}"
            self.notes.append(f"{what}: each is a batch of its own")

    def _open_root(self, cache: Cache) -> None:
        """Use the samples of data.root."""
        hashes, samples = cache.file_hashes(), self.sample_set.find()
        found = look_up(self.sample_set, samples.samples, cache, hashes, self.preserve_prompts)
        self._encoded_views = found.encoded
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
        if others := [f'"{prompt}"' for prompt in self.preserve_prompts if prompt]:
            raise UserError(
                f"objective.preserve.prompts: data.shards={self.source} contains no conditioning of {listing(others)}. "
                'Train on data.root, which is encoded with it, or preserve [""] only.'
            )
        samples = open_shards(self.source, wanted.parts)
        if self.preserve_prompts:
            samples = [sample.preserving([sample.empty_prompt]) for sample in samples]
        held, samples = hold_out(samples, self.val_count)
        self.validation = None
        if held:
            held_out = copy(self)
            held_out.use_encoded(held)
            self.validation = held_out
        self.use_encoded(samples)

    def use_encoded(self, samples: list[EncodedSample]) -> None:
        """Train on these samples, whose images are not known."""
        self.encoded = samples
        self.keys = [sample.key for sample in samples]
        self.sizes = [sample.size for sample in samples]
        self.leading = [index for index, sample in enumerate(samples) if sample.is_first]

    def keep_first(self) -> None:
        if self.views:
            super().keep_first()
        else:
            self.use_encoded(self.encoded[:1])

    def use(self, views: Sequence[Sequence[View]]) -> None:
        super().use(views)
        known = self._encoded_views
        self.encoded = [known[view.sample.key, view.windows] for view in self.views] if known else []

    def batch_limits(self) -> dict[Size, int]:
        tokens: dict[Size, int] = {}
        for sample in self.encoded:
            tokens[sample.size] = max(sample.tokens, tokens.get(sample.size, 1))
        return {
            size: samples_per_batch(self.batch_size, self.max_tokens_per_batch, most) for size, most in tokens.items()
        }

    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        prompts = {prompt for sample in self.encoded for prompt in (*sample.prompts, *sample.preserved)}
        if self.uses_empty_prompt:
            prompts |= {sample.empty_prompt for sample in self.encoded}
        same_sizes = len(set(self.sizes)) == 1 and not self.choices.reference_dropout
        return same_sizes and len({prompt.text_tokens for prompt in prompts}) == 1

    def batch_kinds(self) -> list[Size]:
        if not self.equal_text:
            return super().batch_kinds()
        lengths = [sample.prompts[0].text_tokens for sample in self.encoded]
        return [(images, (*names, f"{n} text tokens")) for (images, names), n in zip(self.sizes, lengths, strict=True)]

    def alike(self, index: int, draw: int) -> Hashable:
        _, prompts = self.encoded[index].chosen_prompts(self.choices, draw) if self.equal_text else (None, [])
        return super().alike(index, draw), *(prompt.text_tokens for prompt in prompts)

    def reader(self, empty_prompt: bool, choices: Choices = FIRST) -> LatentReader:
        """Return a reader of batches; see `LatentReader`."""
        return LatentReader(self.source, self.encoded, empty_prompt, choices)

    def train_batches(self) -> ThreadedLoader:
        return ThreadedLoader(self.reader(self.needs_empty_prompt, self.choices), self.sampler(), self.num_workers)

    def one_by_one(self, which: slice, empty_prompt: bool) -> Iterator[LatentBatch]:
        reader = self.reader(empty_prompt)
        return (reader([(index, 0)]) for index in self.leading[which])

    @property
    def origin(self) -> str:
        if self.shards is not None:
            return str(self.source)
        return super().origin + (f", encoded in {self.source}" if self.encoded else "")
