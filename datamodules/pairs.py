"""Pairs of images, decoded in every step."""

import hashlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.base import DataModule, Model, PromptShapes, model_of
from datamodules.batch import LatentBatch, RawBatch
from datamodules.images.recipe_images import recipe_image_of
from datamodules.images.resizing import Framing, Size, View, bucket_notes, notes_on
from datamodules.images.sample_set import SampleSet, Usable
from datamodules.images.samples import ImageFile, RootSetting
from datamodules.images.windows import ConditionImages, load_image, load_mask
from datamodules.prefetch import Prefetcher
from datamodules.sampler import FIRST, Choices, SizeBatchSampler
from datamodules.shards.reader import EncodedSample
from datamodules.split import Split
from foundation.errors import UserError, count_of, listing


@dataclass(eq=False)
class PairDataset(Dataset[RawBatch]):
    """Views decoded to batches of one, by (index of the view, number of the draw).

    Args:
        choices: random choices of captions, condition images and preserve_prompts.
        preserve_prompts: prompts of which each sample gets one in addition to its own.
    """

    views: Sequence[View]
    condition_images: ConditionImages
    choices: Choices = FIRST
    preserve_prompts: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.weighted = any(view.weight != 1 for view in self.views)
        self.draws_per_epoch = max(1, sum(view.repeats for view in self.views))

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, item: tuple[int, int]) -> RawBatch:
        index, draw = item
        view, choices, others = self.views[index], self.choices, self.preserve_prompts
        sample, (window, *windows) = view.sample_in(draw // self.draws_per_epoch), view.windows
        kept = choices.references(draw, len(sample.controls))
        images = [sample.controls[place] for place in kept], [windows[place] for place in kept]
        controls, prompt_images = self.condition_images.load(*images)
        caption, alpha = choices.caption(draw, len(sample.prompts)), self.condition_images.alpha
        return RawBatch(
            keys=[sample.key],
            draws=[draw],
            prompts=["" if caption is None else sample.prompts[caption]],
            target=load_image(sample.target, window, alpha)[None],
            controls=controls,
            mask=load_mask(sample.mask, window)[None] if sample.mask else None,
            rejected=load_image(sample.rejected, window, alpha)[None] if sample.rejected else None,
            weights=torch.tensor([view.weight]) if self.weighted else None,
            prompt_images=[prompt_images],
            preserve_prompts=[others[choices.preserved(draw, len(others))]] if others else [],
            dropped=[caption is None],
            has_first=0 in kept,
        )


def collate_pixels(samples: list[RawBatch]) -> RawBatch:
    """Join batches whose samples have one size."""

    joined: dict[str, Any] = {}
    for name in (field.name for field in fields(RawBatch)):
        first, *_ = values = [getattr(sample, name) for sample in samples]
        if name == "controls":
            joined[name] = [torch.cat(images) for images in zip(*values, strict=True)]
        elif isinstance(first, Tensor):
            joined[name] = torch.cat(values)
        else:
            joined[name] = list(chain.from_iterable(values)) if isinstance(first, list) else first
    return RawBatch(**joined)


def leave_signals_to_the_trainer(worker: int) -> None:
    """Make a data worker ignore the signals that reach every process of a job: only the trainer acts on them.

    A worker that died of one would end the run at once. If it cannot hand over a batch, as when /dev/shm is full, it
    ends: the trainer would wait for the batch forever.
    """
    Queue._on_queue_feeder_error = staticmethod(lambda error, batch: os._exit(1))  # type: ignore[attr-defined]
    for name in {"SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGBREAK"}.intersection(dir(signal)):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    sys.excepthook = _unless_the_trainer_has_left


def _unless_the_trainer_has_left(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback when the trainer has stopped and closed the connection to this worker."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


class PairsDataModule(DataModule):
    """Pairs of one or several roots, to train on.

    Args:
        buckets: see `Framing`; `auto`: aspect where a batch may have several samples, else exact.
        upscale, crop, crop_count, flip: see `Framing`.
        batch_size: samples per step and process; those of a batch have one size.
        cache_dir, shards, max_tokens_per_batch: see `CachedDataModule`; None where samples are encoded in every step.
        num_workers: processes that decode images.
        caption_dropout_rate: share of the samples that the model sees with the empty prompt.
        reference_dropout: share of the condition images that are left out of a step, each independently.
        preview_count: samples on the contact sheet.
        seed: determines the order of the samples.
        val_root: see `SampleSet`.
        val_count: instead of val_root, how many of root's samples are held out; see `choose_held_out`.
        settings: other settings of `SampleSet`.

    Attributes:
        needs_encoders: whether batches are pixels, which the training step encodes.
        needs_empty_prompt, preserve_prompts: see `Model`. equal_text: see `Geometry`.
        choices: random choices of each draw in training.
        notes: possible mistakes, one line each.
        training: the samples to train on.
        validation: the held-out samples; None if there are none.
    """

    needs_encoders = True
    needs_empty_prompt = False
    preserve_prompts: tuple[str, ...] = ()
    equal_text = False

    def __init__(
        self,
        *,
        upscale: bool,
        buckets: str,
        crop: str,
        crop_count: int,
        flip: bool,
        batch_size: int,
        num_workers: int,
        caption_dropout_rate: float,
        reference_dropout: float,
        preview_count: int,
        seed: int,
        val_root: RootSetting,
        val_count: int,
        cache_dir: str | None = None,
        shards: str | None = None,
        max_tokens_per_batch: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if val_root is not None and val_count:
            raise UserError(f"data.val_root={val_root} and data.val_count={val_count}: choose one")
        if cache_dir is None and (shards, max_tokens_per_batch) != (None, None):
            raise UserError("data.shards and data.max_tokens_per_batch need cached latents. Set data.cache_dir.")
        several = batch_size > 1 or max_tokens_per_batch is not None or crop != "center"
        chosen = ("aspect" if several else "exact") if buckets == "auto" else buckets
        framing = Framing(chosen, upscale, crop, crop_count, flip)
        self.sample_set = SampleSet(val_root=val_root, framing=framing, seed=seed, **settings)
        self.roots = self.sample_set.paths
        roots = [*self.sample_set.roots, *self.sample_set.val_roots]
        if (buckets == "aspect" or crop != "center") and roots and not any(r.resolution for r in roots):
            raise UserError(f"data.buckets={chosen}, data.crop={crop}: both need data.resolution, which is null")
        self.notes: list[str] = []
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_workers = num_workers
        self.choices = Choices(seed, caption_dropout_rate, reference_dropout)
        self.preview_count = preview_count
        self.seed = seed
        self.val_count = val_count
        self.training = Split()
        self.validation: Split | None = None

    def configure_for(self, model: Model) -> None:
        """Check and load images as this model takes them."""
        images, rate = model.condition_images, self.choices.reference_dropout
        if rate and (images.least or images.most == 0):
            why = "needs a condition image for each prompt" if images.least else "takes no condition images"
            raise UserError(f"data.reference_dropout={rate:g}: {model.base.name} {why}. Set it to 0.")
        if rate:  # so that samples look alike with and without them
            images = replace(images, whole_area=None)
        self.sample_set.configure_for(model.base.name, images, model.geometry.side_multiple)
        self.equal_text = model.geometry.equal_text
        if model.objective is not None:
            self.needs_empty_prompt = model.objective.needs_empty_prompt
            self.preserve_prompts = model.objective.preserve_prompts

    @property
    def uses_empty_prompt(self) -> bool:
        """Whether training uses the empty prompt's conditioning, in place of captions or besides them."""
        return self.choices.caption_dropout_rate > 0 or self.needs_empty_prompt

    def setup(self, stage: str) -> None:
        self.configure_for(model_of(self.run))
        self.scan()
        self.note_buckets()

    def scan(self) -> None:
        """Find and check all samples."""
        found = self.sample_set.find()
        usable, notes = self.sample_set.check(found.samples)
        self.notes = [*found.notes, *notes]
        self.take(usable)
        texts = {*self.training.captions, *([""] if self.choices.caption_dropout_rate else [])}
        several = max(len(texts), len(self.preserve_prompts)) > 1
        if self.needs_encoders and self.equal_text and self.batch_size > 1 and several:
            raise UserError(
                f"data.batch_size={self.batch_size}: {self.sample_set.model} needs prompts of one length in a batch, "
                "which is known once they are encoded. Use data=cached, or trainer.accumulate_grad_batches."
            )

    def take(
        self,
        usable: Sequence[Usable],
        checksum: Callable[[ImageFile], str | None] = lambda image: None,
        encoded: Mapping[Hashable, EncodedSample] | None = None,
    ) -> None:
        """Train on these samples, except held-out ones, of which only the first view is used.

        Args:
            checksum: see `SampleSet.held_out`.
            encoded: each view in a cache by the sample's key and its place; None without a cache.

        Raises:
            UserError: no sample is left to train on.
        """
        if not usable:
            raise UserError(f"data.root={listing(self.roots)}: no usable pair is left")
        samples = [one.sample for one in usable]
        views = [self.sample_set.views(one) for one in usable]
        first = [[View(one[0].sample, one[0].windows)] for one in views]
        noun = Split(first).noun
        roots = [self.sample_set.root(sample) for sample in samples]
        if masks := sum(sample.mask is not None for sample in samples):
            self.notes.append(
                f"{masks} of {count_of(len(samples), noun)} have a mask: only its white parts are learned"
            )
        if white := [str(one.sample.mask) for one in usable if one.white_mask]:
            self.notes.append(f"{count_of(len(white), 'masks are white all over, without effect')}: {listing(white)}")
        seen = [view for [view] in first]
        self.notes += notes_on(seen, [one.facts for one in usable], roots, self.sample_set.framing, noun)
        held = self.sample_set.held_out(samples, self.val_count, noun, checksum)

        def split(chosen: list[list[View]]) -> Split:
            known = [(view.sample.key, view.place) for one in chosen for view in one]
            return Split(chosen, [] if encoded is None else [encoded[one] for one in known])

        self.validation = split([first[index] for index in sorted(held)]) if held else None
        self.training = split([one for index, one in enumerate(views) if index not in held])
        if all(view.weight == 0 for view in self.training.views):
            raise UserError("data.root: weight=0 for all samples: there is nothing to learn")

    def note_buckets(self) -> None:
        """Note which buckets are smaller than a batch."""
        limits, kinds = self.batch_limits(), self.batch_kinds()
        full = {kind: limits[size] * self.run.world_size for kind, size in zip(kinds, self.training.sizes, strict=True)}
        self.notes += bucket_notes(kinds, self.training.repeats, full, self.training.noun)

    def batch_kinds(self) -> list[Size]:
        """Return the size of each view, with what else the views of a batch have in common."""
        return self.training.sizes

    @property
    def drawn_sizes(self) -> list[Size]:
        """Sizes as training may draw them, also without condition images where these are dropped."""
        sizes = self.training.sizes
        return sizes + [((images[0],), names) for images, names in sizes if self.choices.reference_dropout]

    def batch_limits(self) -> dict[Size, int]:
        return dict.fromkeys(self.training.sizes, self.batch_size)

    def sampler(self) -> SizeBatchSampler:
        """Return the order of this process's batches from the trainer's position on."""
        trainer = self.run
        return SizeBatchSampler(
            self.training.sizes,
            self.batch_limits(),
            self.seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            # Every step accumulates the same number of batches, also at the end of an epoch.
            start=trainer.global_step * trainer.accumulate_grad_batches,
            repeats=self.training.repeats,
            alike=self.alike if self.choices.reference_dropout or self.equal_text else None,
        )

    def alike(self, index: int, draw: int) -> Hashable:
        """Return what the draws of a batch have in common besides the size: the condition images that are kept."""
        return self.choices.references(draw, len(self.training.sizes[index][0]) - 1)

    def train_dataloader(self) -> Prefetcher:
        return Prefetcher(self.train_batches(), self.run.strategy.root_device)

    def train_batches(self) -> Iterable[RawBatch | LatentBatch]:
        """Return this process's batches, on the CPU, without end, from the trainer's position on."""
        return DataLoader(
            dataset=PairDataset(
                self.training.views, self.sample_set.condition_images, self.choices, self.preserve_prompts
            ),
            batch_sampler=self.sampler(),
            collate_fn=collate_pixels,
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_the_trainer,
        )

    def one_by_one(self, split: Split, which: slice, empty_prompt: bool) -> Iterator[RawBatch | LatentBatch]:
        """Return the first views of some samples in order, each as a batch of one.

        Args:
            empty_prompt: whether latent batches include the empty prompt's conditioning.
        """
        return self.pixels(split, which)

    def pixels(self, split: Split, which: slice) -> Iterator[RawBatch]:
        """Return the first views of some samples in order as pixels, each as a batch of one; none of `data.shards`."""
        dataset = PairDataset(split.views, self.sample_set.condition_images)
        return (dataset[(index, 0)] for index in (split.leading[which] if split.views else ()))

    @cached_property
    def fingerprint(self) -> list[Any]:
        """Number of training samples and a hash of their identities, to compare when a run is resumed."""
        known = hashlib.sha256()
        views = ((view.sample.prompts, view.repeats, view.weight) for view in self.training.views)
        recipes = (image.recipe for sample in self.training.samples if (image := recipe_image_of(sample)))
        for part in (*self.training.keys, *views, *recipes):
            known.update(f"{part}\n".encode(errors="surrogatepass"))
        return [len(self.training), known.hexdigest()]

    def describe(self) -> str:
        """Return the training data in one line, for the summary."""
        split, held_out = self.training, "" if self.validation is None else f", {len(self.validation)} held out"
        views = "" if len(split.sizes) == len(split) else f" in {count_of(len(split.sizes), 'views')}"
        counts = Counter(len(split.sizes[index][0]) - 1 for index in split.leading)
        numbers = [f"{count:,} with {images or 'no'}" for images, count in sorted(counts.items())]
        images = f" ({', '.join(numbers)} condition images)" if len(numbers) > 1 else ""
        return f"{count_of(len(split), split.noun)}{images}{views} of {self.origin}{held_out}"

    @property
    def origin(self) -> str:
        """Place of the samples, for the summary."""
        return ", ".join(map(str, self.sample_set.roots))

    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        """Return whether all batches are known to have the same shapes before prompts are encoded."""
        more = [*self.preserve_prompts, *([""] if self.uses_empty_prompt else [])]
        kinds = {(view.size, prompt) for view in self.training.views for prompt in (*view.sample.prompts, *more)}
        shapes = {(size, str(prompt_shapes(prompt, list(size[0][1:])))) for size, prompt in kinds}
        return len(shapes) == 1 and not self.choices.reference_dropout
