"""Raw image pairs, decoded on the fly."""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch as L
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.batch import LatentBatch, RawBatch
from datamodules.errors import UserError, listing, printable
from datamodules.images.conditions import ConditionImages
from datamodules.images.dataset import PairDataset, collate, leave_signals_to_the_trainer, pictures
from datamodules.images.sources import Found, Sample
from datamodules.images.transforms import MOST_PIXELS, floor_size, image_size, verify_image
from datamodules.prefetch import Feed
from datamodules.sampler import SizeBatchSampler

log = logging.getLogger("retouch")

# More is allowed, and said: pixels, and how many times as long as wide.
LARGE, LONG = 2**22, 8
# (width, height) of the target, then of each control; and whether there is a mask
Size = tuple[tuple[tuple[int, int], ...], bool]


class Example(NamedTuple):
    """A sample to look at: its pictures, controls first, each (1, 3, h, w), where they are at hand; and itself."""

    pictures: list[Tensor]
    batch: RawBatch | LatentBatch


class PairsDataModule(L.LightningDataModule):
    """Pairs from one or several roots, each at its own size floored to 16.

    Args:
        root: a folder or a metadata table, or a list of them.
        source: finds the samples of the roots; see `datamodules.images.sources` and `datamodules.images.captions`.
        batch_size: samples a step and process; a batch holds samples of one size.
        num_workers: processes that decode images.
        on_missing: what to do about a target without control or caption, or a control without target.
        on_bad_image: what to do about an image that cannot be read or is smaller than 16 pixels.
        caption_dropout_rate: share of the samples that the model sees with the empty prompt.
        preview_count: samples on the contact sheet.
        seed: decides the order.
        val_root: as `root`, of samples held out for validation.
        val_count: instead, how many of root's samples are held out, or a few more; the same ones whatever the seed.

    Attributes:
        validation: the samples that are held out, as a data module of their own; None where there are none.
    """

    needs_encoders = True
    max_tokens_per_batch: int | None = None

    def __init__(
        self,
        root: str | Sequence[str] | None,
        source: Callable[[list[str]], Found],
        batch_size: int,
        num_workers: int,
        on_missing: Literal["error", "skip"],
        on_bad_image: Literal["error", "skip"],
        caption_dropout_rate: float,
        preview_count: int,
        seed: int,
        val_root: str | Sequence[str] | None,
        val_count: int,
    ) -> None:
        super().__init__()
        if val_root is not None and val_count:
            raise UserError(f"data.val_root={val_root} and data.val_count={val_count}: choose one")
        for name, value in (("on_missing", on_missing), ("on_bad_image", on_bad_image)):
            if value not in ("error", "skip"):
                raise UserError(f"data.{name}={value}: choose error or skip")
        self.roots = _listed("root", root)
        self.source = source
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.on_missing = on_missing
        self.on_bad_image = on_bad_image
        self.caption_dropout_rate = caption_dropout_rate
        self.preview_count = preview_count
        self.seed = seed
        self.model = ""
        self.condition_images = ConditionImages()
        self.val_roots = _listed("val_root", val_root)
        self.val_count = val_count
        self.validation: PairsDataModule | None = None
        self._held_out: set[Sample] = set()
        self.samples: list[Sample] = []
        self.keys: list[str] = []
        self.sizes: list[Size] = []
        self.notes: list[str] = []

    def serve(self, module: Any) -> None:
        """Prepare the condition images as this model wants them."""
        self.model, self.condition_images = module.repository_name, module.condition_images

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.serve(self.trainer.lightning_module)
        self.scan()

    def scan(self) -> None:
        """Find and check all samples."""
        checked = self.check(self.find())
        if not checked:
            raise UserError(f"data.root={listing([str(root) for root in self.roots])}: no usable pair is left")
        self.samples = [sample for sample, _, _ in checked]
        self.keys = [sample.key for sample in self.samples]
        self.sizes = [size for _, size, _ in checked]
        self.note_what_stands_out(sum(rounded for _, _, rounded in checked))
        self.hold_out()

    def hold_out(self) -> None:
        """Part the samples into those to learn from and those that `validation` has.

        Raises:
            UserError: none is left to learn from.
        """
        held = {index for index, sample in enumerate(self.samples) if sample in self._held_out}
        # Samples of the same pictures, with other instructions or the other way round, stay together.
        groups: dict[Hashable, list[int]] = {}
        for index, key in enumerate(self.keys):
            sample = self.samples[index] if self.samples else None
            pictures = key if sample is None else frozenset((sample.target, *sample.controls))
            groups.setdefault(pictures, []).append(index)
        order = sorted(groups.values(), key=lambda group: hashlib.sha256(self.keys[group[0]].encode()).digest())
        for group in order:
            if len(held) < self.val_count:
                held.update(group)
        if not held:
            return
        count = len(self.keys)
        if len(held) == count and self.val_roots:
            raise UserError(
                f"data.val_root={listing(self.val_roots)} has all {count} {self.noun} of data.root: none is left to "
                "learn from"
            )
        if len(held) == count:
            most = count - len(order[-1])
            remedy = f"at most data.val_count={most}" if most else "leave it out: all of them are of the same pictures"
            raise UserError(
                f"data.val_count={self.val_count} of {count} {self.noun} leaves none to learn from: {remedy}"
            )
        self.validation = None
        held_out = copy(self)
        held_out.take(sorted(held))
        self.take([index for index in range(len(self.keys)) if index not in held])
        self.validation = held_out

    def take(self, indices: Sequence[int]) -> None:
        """Keep these samples only."""
        self.samples = [self.samples[index] for index in indices] if self.samples else []
        self.keys = [self.keys[index] for index in indices]
        self.sizes = [self.sizes[index] for index in indices]

    def require_root(self) -> None:
        """Raise a UserError where no data is named."""
        if not self.roots:
            raise UserError("nothing to learn from: give data.root=FOLDER, or data=shapes for drawn examples")

    def find(self) -> list[Sample]:
        """The complete samples, those of val_root last; what is wrong with the others becomes a note.

        Raises:
            UserError: some are incomplete, unless on_missing is `skip`.
        """
        self.require_root()
        found = self.source(self.roots)
        if self.val_roots:
            try:
                held_out = self.source(self.val_roots)
            except UserError as error:  # sources speak of data.root
                raise UserError(str(error).replace("data.root=", "data.val_root=")) from error
            taken = {sample.key for sample in found.samples}
            if any(sample.key in taken for sample in held_out.samples):  # keys tell samples apart
                names = [replace(sample, key=f"held_out/{sample.key}") for sample in held_out.samples]
                held_out = Found(names, held_out.incomplete)
            self._held_out = set(held_out.samples)
            targets = {sample.target.resolve() for sample in held_out.samples}
            learned = [sample for sample in found.samples if sample.target.resolve() not in targets]
            found = Found([*learned, *held_out.samples], found.incomplete + held_out.incomplete)
        self.notes = []
        if found.incomplete:
            what = f"{len(found.incomplete)} incomplete: {listing(found.incomplete)}"
            if self.on_missing == "error":
                raise UserError(f"{what}. Complete them, or pass data.on_missing=skip")
            self.notes.append(f"skipped {what}")
        self._check_counts(found.samples)
        return found.samples

    def _check_counts(self, samples: Sequence[Sample]) -> None:
        """Raise a UserError where the model takes fewer or more condition images."""
        most = self.condition_images.most
        if most == 0 and (some := [sample.key for sample in samples if sample.controls]):
            raise UserError(
                f"{self.model} makes pictures from text alone, but {listing(some)} of data.root={self.roots[0]} start "
                "from condition images: train a model that edits (model=flux_kontext, qwen_image_edit), or train on "
                "the targets alone by data=captions and their folder as data.root"
            )
        if most != 0 and (bare := [sample.key for sample in samples if not sample.controls]):
            raise UserError(
                f"{self.model} edits pictures, but {listing(bare)} of data.root={self.roots[0]} have no condition "
                "image to start from: use data=cached with pairs, or model=flux_dev with data=captions"
            )
        if most and (many := [f"{s.key} ({len(s.controls)})" for s in samples if len(s.controls) > most]):
            raise UserError(
                f"{self.model} takes {self.condition_images.limit}, there are more in "
                f"{listing(many)} of data.root={self.roots[0]}"
            )

    def check(self, samples: Sequence[Sample]) -> list[tuple[Sample, Size, bool]]:
        """The usable samples, each with its size and whether a side was rounded down.

        Raises:
            UserError: some are unusable, unless on_bad_image is `skip`.
        """
        with ThreadPoolExecutor() as pool:
            checked = list(pool.map(partial(_check, self.condition_images), samples))
        bad = [printable(str(size)) for size in checked if isinstance(size, UserError)]
        if bad:
            what = f"{len(bad)} unusable: {listing(bad)}"
            if self.on_bad_image == "error":
                raise UserError(f"{what}. Mend or remove them, or pass data.on_bad_image=skip")
            self.notes.append(f"skipped {what}")
        return [(s, *size) for s, size in zip(samples, checked, strict=True) if not isinstance(size, UserError)]

    def note_what_stands_out(self, rounded: int) -> None:
        """Things that are allowed, but may not be meant."""
        if empty := sum(not sample.prompt for sample in self.samples):
            self.notes.append(f"{empty} captions are empty")
        if rounded:
            self.notes.append(f"{rounded} {self.noun} have sides rounded down to a multiple of 16")
        if large := sum(any(width * height > LARGE for width, height in images) for images, _ in self.sizes):
            self.notes.append(
                f"{large} {self.noun} have more than {LARGE / 1e6:.0f} megapixels: task=dry_run says what a step with "
                "them takes, shrunk ones take less"
            )
        if long := sum(any(max(size) > LONG * min(size) for size in images) for images, _ in self.sizes):
            self.notes.append(f"{long} {self.noun} are more than {LONG} times as long as wide")

    def batch_limits(self) -> Mapping[Size, int] | int:
        """How many samples of a size make a batch."""
        return self.batch_size

    def sampler(self) -> SizeBatchSampler:
        """This process's order, from the position that the trainer has reached."""
        trainer = self.trainer
        assert trainer is not None
        sampler = SizeBatchSampler(
            self.sizes,
            self.batch_limits(),
            self.seed,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            # Accumulation windows are never cut short, so a finished step stands for a fixed number of batches.
            start=trainer.global_step * trainer.accumulate_grad_batches,
        )
        refuse_epochs(trainer, sampler.batches_per_epoch(), len(self.sizes))
        return sampler

    def train_dataloader(self) -> Feed:
        assert self.trainer is not None
        return Feed(self.train_batches(), self.trainer.strategy.root_device)

    def train_batches(self) -> Iterable[RawBatch | LatentBatch]:
        """This process's batches, on the host."""
        return DataLoader(
            dataset=PairDataset(self.samples, self.condition_images),
            batch_sampler=self.sampler(),
            collate_fn=collate,
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_the_trainer,
        )

    def pixels(self, count: int) -> list[RawBatch]:
        """The first few samples, each as a batch of one."""
        dataset = PairDataset(self.samples, self.condition_images)
        return [dataset[(index, 0)] for index in range(min(count, len(dataset)))]

    def examples(self, count: int, empty_prompt: bool) -> list[Example]:
        """The first few samples, to make pictures of; whether with the empty prompt's conditioning, if encoded."""
        return [Example(pictures(raw), raw) for raw in self.pixels(count)]

    def one_by_one(self) -> Iterator[RawBatch | LatentBatch]:
        """All samples in order, each as a batch of one."""
        dataset = PairDataset(self.samples, self.condition_images)
        return (dataset[(index, 0)] for index in range(len(dataset)))

    @property
    def knows_prompts(self) -> bool:
        """Whether batches tell them."""
        return bool(self.samples)

    @property
    def noun(self) -> str:
        """What the samples are."""
        return "pairs" if any(len(images) > 1 for images, _ in self.sizes) else "pictures"

    def describe(self) -> str:
        """What there is to learn from, for the summary."""
        held_out = "" if self.validation is None else f", {len(self.validation.sizes)} held out"
        return f"{len(self.sizes)} {self.noun} of {', '.join(map(str, self.roots))}{held_out}"

    def is_uniform(self, module: Any) -> bool:
        """Whether all batches are alike in their shapes, as far as is known before prompts are encoded."""
        samples = zip(self.samples, self.sizes, strict=True)
        shapes = {(size, str(module.prompt_shapes(sample.prompt, size[0][1:]))) for sample, size in samples}
        return len(shapes) == 1 and len(self.samples) % self.batch_size == 0

    def batches_per_epoch(self) -> float:
        """Of this process."""
        return self.sampler().batches_per_epoch()

    def size_counts(self) -> Counter[tuple[int, int]]:
        """How many targets there are of each (width, height)."""
        return Counter(images[0] for images, _ in self.sizes)


def _listed(name: str, value: str | Sequence[str] | None) -> list[str]:
    """One or several, as they are given; raises UserError for a name that the run's files could not hold."""
    roots = [str(one) for one in ([value] if isinstance(value, str) else value or []) if one not in (None, "")]
    for root in roots:
        if printable(root) != root:
            raise UserError(f"data.{name}={printable(root)}: the name is not UTF-8: rename it, or give a link to it")
    return roots


def refuse_epochs(trainer: L.Trainer, batches_per_epoch: float, samples: int) -> None:
    """Raise a UserError where the length is given in epochs, which have no end here."""
    if trainer.max_epochs not in (None, -1):
        steps = math.ceil(batches_per_epoch * trainer.max_epochs / trainer.accumulate_grad_batches)
        raise UserError(
            f"trainer.max_epochs={trainer.max_epochs}: length is given in steps. For {trainer.max_epochs} epochs "
            f"of these {samples} samples pass trainer.max_steps={steps}"
        )


def _check(condition_images: ConditionImages, sample: Sample) -> tuple[Size, bool] | UserError:
    """The sample's size and whether a side was rounded, or what is wrong with one of its files."""
    try:
        images = (sample.target, *sample.controls)
        target, *controls = [image_size(path) for path in images]
        own = [target, *(controls if condition_images.vae_image_size is None else [])]
        for path, size in zip(images, own, strict=False):
            _refuse_large(path, *size)
        for path in (*images, *([sample.mask] if sample.mask else [])):
            verify_image(path)
    except UserError as error:
        return error
    sizes = (floor_size(*target), *(condition_images.size(*control) for control in controls))
    return (sizes, sample.mask is not None), any(floor_size(*size) != size for size in own)


def _refuse_large(path: Path, width: int, height: int) -> None:
    """Raise a UserError for a picture whose step would take hundreds of gigabytes."""
    if width * height > MOST_PIXELS:
        raise UserError(
            f"the image {path} is {width}x{height}, {width * height / 1e6:.1f} megapixels: at most "
            f"{MOST_PIXELS / 1e6:.1f} are learned at their own size; shrink it"
        )
