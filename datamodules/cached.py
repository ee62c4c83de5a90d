"""Cached latents: training without running the encoders."""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from datamodules.base import Model, PromptShapes, model_of
from datamodules.batch import LatentBatch
from datamodules.contents import look_up
from datamodules.images.resizing import Size
from datamodules.images.samples import RootSetting
from datamodules.pairs import PairsDataModule
from datamodules.prefetch import ThreadedLoader
from datamodules.sampler import FIRST, Choices, samples_per_batch
from datamodules.shards.cache import FINGERPRINT, Cache, Folder, open_cache
from datamodules.shards.reader import LatentReader, hold_out, open_shards
from datamodules.shards.transfer import Bucket
from datamodules.split import Split
from foundation.errors import UserError, listing, without_credentials
from foundation.stores import working_folder


class CachedDataModule(PairsDataModule):
    """Encoded samples in shards: those of data.root, or all of a cache.

    Args:
        cache_dir: contains a folder for each fingerprint. A cache in a bucket is filled, but never read from here.
        shards: the folder or URL of a cache, instead of data.root. FINGERPRINT in it is replaced by the run's own
            fingerprint. Only the index is read in advance.
        max_tokens_per_batch: instead of batch_size, the most tokens of a batch: large images come in small batches,
            small ones in large.
        settings: settings of `PairsDataModule`.
    """

    needs_encoders = False

    def __init__(self, *, cache_dir: str, root: RootSetting, shards: str | None, **settings: Any) -> None:
        if shards is not None and root is not None:
            where = f"data.shards={without_credentials(shards)} and data.root={root}"
            raise UserError(f"{where}: both are set. Leave one out.")
        super().__init__(cache_dir=cache_dir, root=root, shards=shards, **settings)
        self.cache_dir = cache_dir
        self.shards = shards
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
        if budget and (above := sum(sample.tokens > budget for sample in self.training.encoded)):
            what = f"{above} samples have more tokens than data.max_tokens_per_batch={budget}"
            self.notes.append(f"{what}: each is a batch of its own")

    def _open_root(self, cache: Cache) -> None:
        hashes, samples = cache.file_hashes(), self.sample_set.find()
        found = look_up(self.sample_set, samples.samples, cache, hashes, self.preserve_prompts)
        changed, notes = self.sample_set.check(found.missing)
        self.notes = [*samples.notes, *notes]
        if changed:
            absent = listing([one.sample.key for one in changed])
            hint = "Fill it from a machine that may write to it."
            if cache.touch():
                hint = "If files have just changed, start again. Several machines need a shared disk, or data.shards."
            raise UserError(f"{absent} not in the cache {cache}. {hint}")
        self.take(found.usable, hashes.get, found.encoded)

    def _open_shards(self, url: str, wanted: Cache) -> None:
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
        self.training = Split(encoded=samples)
        self.validation = Split(encoded=held) if held else None

    def batch_limits(self) -> dict[Size, int]:
        tokens: dict[Size, int] = {}
        for sample in self.training.encoded:
            tokens[sample.size] = max(sample.tokens, tokens.get(sample.size, 1))
        return {
            size: samples_per_batch(self.batch_size, self.max_tokens_per_batch, most) for size, most in tokens.items()
        }

    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        prompts = {prompt for sample in self.training.encoded for prompt in (*sample.prompts, *sample.preserved)}
        if self.uses_empty_prompt:
            prompts |= {sample.empty_prompt for sample in self.training.encoded}
        same_sizes = len(set(self.training.sizes)) == 1 and not self.choices.reference_dropout
        return same_sizes and len({prompt.text_tokens for prompt in prompts}) == 1

    def batch_kinds(self) -> list[Size]:
        if not self.equal_text:
            return super().batch_kinds()
        lengths = [sample.prompts[0].text_tokens for sample in self.training.encoded]
        sizes = zip(self.training.sizes, lengths, strict=True)
        return [(images, (*names, f"{n} text tokens")) for (images, names), n in sizes]

    def alike(self, index: int, draw: int) -> Hashable:
        _, prompts = self.training.encoded[index].chosen_prompts(self.choices, draw) if self.equal_text else (None, [])
        return super().alike(index, draw), *(prompt.text_tokens for prompt in prompts)

    def reader(self, empty_prompt: bool, choices: Choices = FIRST) -> LatentReader:
        """Return a reader of training batches; see `LatentReader`."""
        return LatentReader(self.source, self.training.encoded, empty_prompt, choices)

    def train_batches(self) -> ThreadedLoader:
        return ThreadedLoader(self.reader(self.needs_empty_prompt, self.choices), self.sampler(), self.num_workers)

    def one_by_one(self, split: Split, which: slice, empty_prompt: bool) -> Iterator[LatentBatch]:
        read = LatentReader(self.source, split.encoded, empty_prompt)
        return (read([(index, 0)]) for index in split.leading[which])

    @property
    def origin(self) -> str:
        if self.shards is not None:
            return str(self.source)
        return super().origin + (f", encoded in {self.source}" if self.training.encoded else "")
