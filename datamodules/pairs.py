"""Pairs of pictures, decoded in every step."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal

from torch.utils.data import DataLoader

from datamodules.base import Example, PromptShapes, TrainingData
from datamodules.batch import LatentBatch, RawBatch, Size
from datamodules.errors import UserError
from datamodules.images.conditions import Model, model_of
from datamodules.images.dataset import PairDataset, collate, leave_signals_to_the_trainer, pictures
from datamodules.images.held_out import choose_held_out
from datamodules.images.roots import RootSetting
from datamodules.images.sample import Sample, Source
from datamodules.images.sample_set import SampleSet, unusual
from datamodules.sampler import SizeBatchSampler


class PairsDataModule(TrainingData):
    """Pairs of one or several roots, each at its own size floored to 16.

    Args:
        root, source, on_missing, on_bad_image, val_root: see `SampleSet`.
        batch_size: samples per step and process; those of a batch have one size.
        num_workers: processes that decode images.
        caption_dropout_rate: share of the samples that the model sees with the empty prompt.
        preview_count: samples on the contact sheet.
        seed: determines the order of the samples.
        val_count: instead of val_root, how many of root's samples are held out; see `choose_held_out`.
    """

    needs_encoders = True

    def __init__(
        self,
        root: RootSetting,
        source: Source,
        batch_size: int,
        num_workers: int,
        on_missing: Literal["error", "skip"],
        on_bad_image: Literal["error", "skip"],
        caption_dropout_rate: float,
        preview_count: int,
        seed: int,
        val_root: RootSetting,
        val_count: int,
        resolution: int | Sequence[int] | None,
        prefix: str,
        trigger_word: str | None,
        columns: Mapping[str, Any] | None,
        pair_suffixes: Sequence[str] | None,
    ) -> None:
        super().__init__()
        if val_root is not None and val_count:
            raise UserError(f"data.val_root={val_root} and data.val_count={val_count}: choose one")
        self.sample_set = SampleSet(
            root,
            val_root,
            source,
            on_missing,
            on_bad_image,
            resolution=resolution,
            prefix=prefix,
            trigger_word=trigger_word,
            columns=columns,
            pair_suffixes=pair_suffixes,
        )
        self.roots = self.sample_set.paths
        self.notes = self.sample_set.notes
        self.batch_size = batch_size
        self.max_tokens_per_batch = None
        self.num_workers = num_workers
        self.caption_dropout_rate = caption_dropout_rate
        self.preview_count = preview_count
        self.seed = seed
        self.val_count = val_count
        self.validation = None
        self.samples: list[Sample] = []
        self.keys: list[str] = []
        self.sizes: list[Size] = []

    def configure_for(self, model: Model) -> None:
        """Check and load condition images as this model takes them."""
        self.sample_set.configure_for(model)

    def setup(self, stage: str) -> None:
        self.configure_for(model_of(self.run))
        self.scan()

    def scan(self) -> None:
        """Find and check all samples."""
        usable = self.sample_set.check(self.sample_set.find())
        self.sample_set.require_some(usable)
        self.samples = [one.sample for one in usable]
        self.keys = [sample.key for sample in self.samples]
        self.sizes = [one.size for one in usable]
        self.note_unusual(sum(one.rounded for one in usable))
        self.hold_out()

    def note_unusual(self, rounded: int) -> None:
        """Note what may be a mistake; `rounded` samples have a side that is rounded down."""
        self.notes += unusual(
            [prompt for sample in self.samples for prompt in sample.prompts], self.sizes, rounded, self.noun
        )

    def hold_out(self) -> None:
        """Move the samples to hold out into `validation`, a data module of their own.

        Raises:
            UserError: none is left to train on.
        """
        by_pictures: list[Hashable] = [frozenset((sample.target, *sample.controls)) for sample in self.samples]
        named = {index for index, sample in enumerate(self.samples) if sample in self.sample_set.held_out}
        held = choose_held_out(
            self.keys, by_pictures or self.keys, named, self.sample_set.val_paths, self.val_count, self.noun
        )
        if not held:
            return
        self.validation = None
        held_out = copy(self)
        held_out.keep_only(sorted(held))
        self.keep_only([index for index in range(len(self.keys)) if index not in held])
        self.validation = held_out

    def keep_only(self, indices: Sequence[int]) -> None:
        """Leave all other samples out."""
        self.samples = [self.samples[index] for index in indices] if self.samples else []
        self.keys = [self.keys[index] for index in indices]
        self.sizes = [self.sizes[index] for index in indices]

    def batch_limits(self) -> dict[Size, int]:
        """How many samples of each size make a batch."""
        return dict.fromkeys(self.sizes, self.batch_size)

    def sampler(self) -> SizeBatchSampler:
        """The order of this process's batches, from the trainer's position on."""
        trainer = self.run
        return SizeBatchSampler(
            self.sizes,
            self.batch_limits(),
            self.seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            # Every step accumulates the same number of batches, also at the end of an epoch.
            start=trainer.global_step * trainer.accumulate_grad_batches,
        )

    def batches_per_epoch(self) -> float:
        return self.sampler().batches_per_epoch()

    def dataset(self) -> PairDataset:
        """The samples, decoded to pixels."""
        return PairDataset(self.samples, self.sample_set.condition_images)

    def train_batches(self) -> Iterable[RawBatch | LatentBatch]:
        return DataLoader(
            dataset=self.dataset(),
            batch_sampler=self.sampler(),
            collate_fn=collate,
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_the_trainer,
        )

    def raw_one_by_one(self, which: slice) -> Iterator[RawBatch]:
        """These of the samples in order as pixels, each as a batch of one."""
        dataset = self.dataset()
        return (dataset[(index, 0)] for index in range(len(dataset))[which])

    def one_by_one(self, which: slice, empty_prompt: bool) -> Iterator[RawBatch | LatentBatch]:
        return self.raw_one_by_one(which)

    def pixels(self, count: int) -> list[RawBatch]:
        return list(self.raw_one_by_one(slice(count)))

    def examples(self, which: slice, empty_prompt: bool) -> list[Example]:
        return [Example(pictures(raw), raw) for raw in self.raw_one_by_one(which)]

    @property
    def sample_count(self) -> int:
        return len(self.keys)

    @property
    def knows_prompts(self) -> bool:
        return bool(self.samples)

    @property
    def noun(self) -> str:
        """What messages call the samples."""
        return "pairs" if any(len(images) > 1 for images, _ in self.sizes) else "pictures"

    def describe(self) -> str:
        held_out = "" if self.validation is None else f", {self.validation.sample_count} held out"
        noun = self.noun.removesuffix("s") if self.sample_count == 1 else self.noun
        return f"{self.sample_count} {noun} of {', '.join(self.roots)}{held_out}"

    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        samples = zip(self.samples, self.sizes, strict=True)
        shapes = {
            (size, str(prompt_shapes(prompt, list(size[0][1:]))))
            for sample, size in samples
            for prompt in sample.prompts
        }
        return len(shapes) == 1 and len(self.samples) % self.batch_size == 0

    def size_counts(self) -> Counter[tuple[int, int]]:
        return Counter(images[0] for images, _ in self.sizes)
