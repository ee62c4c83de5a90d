"""What a run and its callbacks may ask of their data."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, cast

import lightning.pytorch as L
from torch import Tensor

from datamodules.batch import LatentBatch, PromptRequest, RawBatch
from datamodules.images.windows import ConditionImages
from datamodules.prefetch import Prefetcher
from datamodules.sizes import Sizes


class Example(NamedTuple):
    """A sample as a batch of one, and its pictures, controls first, each (1, 3, h, w); none for latents alone."""

    pictures: list[Tensor]
    batch: RawBatch | LatentBatch


# A prompt and its condition images' (width, height) -> the shape of each tensor of its conditioning.
PromptShapes = Callable[[str, list[tuple[int, int]]], Mapping[str, tuple[int, ...]]]


class Asking(Protocol):
    """What a step minimizes, as far as the data has to do with it.

    Attributes:
        needs_empty_prompt: whether batches must have the empty prompt's conditioning.
        preserve_prompts: of which each sample of a training batch gets one beside its own.
    """

    needs_empty_prompt: bool
    preserve_prompts: tuple[str, ...]


class Model(Protocol):
    """What the data needs to know of the model."""

    @property
    def base(self) -> "NamedBase":
        """The frozen pipeline."""

    @property
    def encoder(self) -> "Fingerprinted":
        """What makes latents of pictures and prompts."""

    @property
    def objective(self) -> Asking | None:
        """What it is trained for; None where it is not."""

    @property
    def condition_images(self) -> ConditionImages:
        """How many it takes, and at what sizes."""

    @property
    def geometry(self) -> "ImageGeometry":
        """Of which numbers the sides of its pictures are multiples."""


class NamedBase(Protocol):
    """A pipeline that messages name."""

    name: str


class ImageGeometry(Protocol):
    """What a model's pipeline makes pictures of.

    Attributes:
        side_multiple: of which both sides are multiples.
        preferred_sizes: the (width, height) that it resizes a picture to; empty if it takes any.
        resolution: side of a square picture.
        text: the prompt tensor (L, ...) that has as many rows as there are text tokens.
    """

    @property
    def text(self) -> str: ...

    @property
    def side_multiple(self) -> int: ...

    @property
    def preferred_sizes(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def resolution(self) -> int: ...


class Fingerprinted(Protocol):
    """Encoders that know what their outputs depend on."""

    def fingerprint_parts(self, memo: Path) -> Mapping[str, Any]:
        """All of it, beside their inputs.

        Args:
            memo: a file that remembers the checksums of a local model's files.
        """


def model_of(trainer: L.Trainer) -> Model:
    """The trainer's model."""
    return cast(Model, trainer.lightning_module)


class DataModule(L.LightningDataModule):
    """A data module with typed access to its trainer, and from its trainer."""

    @classmethod
    def of(cls, trainer: L.Trainer) -> Self:
        """The data module of a trainer, which must be of this class."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, cls), f"{type(data).__name__} is not a {cls.__name__}"
        return data

    @property
    def run(self) -> L.Trainer:
        """The trainer that this data module is attached to."""
        assert self.trainer is not None, "not attached to a trainer"
        return self.trainer


class PromptData(DataModule, ABC):
    """Data of trainer.predict, whose prompts are encoded before anything else."""

    @abstractmethod
    def all_prompts(self) -> list[PromptRequest]:
        """The prompts that this process encodes first; none if each is encoded together with its sample."""


class TrainingData(DataModule, ABC):
    """Data of trainer.fit.

    Attributes:
        batch_size: samples per step and process.
        max_tokens_per_batch: instead, the most tokens of a batch; None where batch_size applies.
        caption_dropout_rate: share of the samples whose prompt is replaced by the empty one.
        needs_encoders: whether batches are pixels, which the training step has to encode.
        needs_empty_prompt, preserve_prompts: of `Asking`.
        notes: what may be a mistake, one line each.
        validation: the held-out samples, as a data module of their own; None if there are none.
        sizes: of each view of a sample; none where samples are streamed.
        encodings: the folder of the model's cache, for encodings of samples that are shown; None where encoders stay.
    """

    batch_size: int
    max_tokens_per_batch: int | None
    caption_dropout_rate: float
    needs_encoders: bool
    needs_empty_prompt: bool = False
    preserve_prompts: tuple[str, ...] = ()
    notes: list[str]
    validation: "TrainingData | None"
    sizes: Sizes = Sizes([], [])
    encodings: Path | None = None

    def serve(self, objective: Asking | None) -> None:
        """Let batches have what an objective asks for; None asks for nothing."""
        if objective is not None:
            self.needs_empty_prompt = objective.needs_empty_prompt
            self.preserve_prompts = objective.preserve_prompts

    @property
    def with_empty_prompt(self) -> bool:
        """Whether training batches have the empty prompt's conditioning."""
        return self.caption_dropout_rate > 0 or self.needs_empty_prompt

    @property
    @abstractmethod
    def sample_count(self) -> int:
        """How many samples there are, not counting held-out ones."""

    @cached_property
    def fingerprint(self) -> list[Any]:
        """The number of training samples and a hash of what is known of them, to compare when a run is resumed."""
        known = hashlib.sha256()
        for part in self.identities():
            known.update(f"{part}\n".encode(errors="surrogatepass"))
        return [self.sample_count, known.hexdigest()]

    @abstractmethod
    def identities(self) -> Iterable[object]:
        """The facts that tell one set of training samples from another."""

    def captions(self) -> Counter[str]:
        """How many samples have each caption; none where batches do not carry the prompts as text."""
        return Counter()

    @abstractmethod
    def describe(self) -> str:
        """The training data in one line, for the summary."""

    @abstractmethod
    def size_counts(self) -> Counter[tuple[int, int]]:
        """How many targets there are of each (width, height)."""

    @abstractmethod
    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        """Whether all batches have the same shapes, as far as is known before prompts are encoded."""

    @abstractmethod
    def batches_per_epoch(self) -> float:
        """Of this process; estimated where the samples' sizes are not known."""

    @abstractmethod
    def train_batches(self) -> Iterable[RawBatch | LatentBatch]:
        """This process's batches, on the CPU, without end, from the trainer's position on."""

    @abstractmethod
    def one_by_one(self, which: slice, empty_prompt: bool) -> Iterator[RawBatch | LatentBatch]:
        """These of the samples in order, each as a batch of one.

        Args:
            empty_prompt: whether latent batches include the empty prompt's conditioning.
        """

    @abstractmethod
    def pixels(self, count: int) -> list[RawBatch]:
        """The first `count` samples as pixels, each as a batch of one; none if the data is latents alone."""

    @abstractmethod
    def examples(self, which: slice, negative_prompt: str | None) -> list[Example]:
        """Return these of the samples with their pictures.

        Args:
            negative_prompt: to guide away from; a cache holds the conditioning of "" only, and with another prompt
                batches are pixels where there are some. None where it is not needed.
        """

    def train_dataloader(self) -> Prefetcher:
        return Prefetcher(self.train_batches(), self.run.strategy.root_device)
