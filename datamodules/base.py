"""The data of a run, as the model, its callbacks and the trainer see it."""

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
    """A sample as a batch of one, and its images, controls first, each (1, 3, h, w); no images for latents only."""

    pictures: list[Tensor]
    batch: RawBatch | LatentBatch


# A prompt and its condition images' (width, height) -> the shape of each tensor of its conditioning.
PromptShapes = Callable[[str, list[tuple[int, int]]], Mapping[str, tuple[int, ...]]]


class Asking(Protocol):
    """The demands of an objective on the data.

    Attributes:
        needs_empty_prompt: whether batches must contain the empty prompt's conditioning.
        preserve_prompts: each sample of a training batch gets one of them alongside its own.
    """

    needs_empty_prompt: bool
    preserve_prompts: tuple[str, ...]


class NamedBase(Protocol):
    """A frozen pipeline with the name that messages use."""

    name: str


class Fingerprinted(Protocol):
    """Encoders that specify what their outputs depend on."""

    def fingerprint_parts(self, memo: Path) -> Mapping[str, Any]:
        """Return all settings and versions that the outputs depend on, besides the inputs.

        Args:
            memo: a file with the checksums of a local model's files.
        """


class ImageGeometry(Protocol):
    """The images of a model's pipeline.

    Attributes:
        side_multiple: a divisor of both sides.
        preferred_sizes: the (width, height) that it resizes an image to; empty if it takes any.
        resolution: side of a square image.
        text: the name of the prompt tensor (L, ...) that has a row for each text token.
    """

    @property
    def text(self) -> str: ...

    @property
    def side_multiple(self) -> int: ...

    @property
    def preferred_sizes(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def resolution(self) -> int: ...


class Model(Protocol):
    """The part of the model that the data depends on; `objective` is None outside of training."""

    @property
    def base(self) -> NamedBase: ...

    @property
    def encoder(self) -> Fingerprinted: ...

    @property
    def objective(self) -> Asking | None: ...

    @property
    def condition_images(self) -> ConditionImages: ...

    @property
    def geometry(self) -> ImageGeometry: ...


def model_of(trainer: L.Trainer) -> Model:
    """Return the trainer's model."""
    return cast(Model, trainer.lightning_module)


class DataModule(L.LightningDataModule):
    """A data module with typed access to its trainer, and from its trainer."""

    @classmethod
    def of(cls, trainer: L.Trainer) -> Self:
        """Return the data module of a trainer, which must be of this class."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, cls), f"{type(data).__name__} is not a {cls.__name__}"
        return data

    @property
    def run(self) -> L.Trainer:
        """The trainer that this data module is attached to."""
        assert self.trainer is not None, "not attached to a trainer"
        return self.trainer


class PromptData(DataModule, ABC):
    """Data of trainer.predict, whose prompts are encoded before all other inputs."""

    @abstractmethod
    def all_prompts(self) -> list[PromptRequest]:
        """Return the prompts that this process encodes first; none if each is encoded together with its sample."""


class TrainingData(DataModule, ABC):
    """Data of trainer.fit.

    Attributes:
        batch_size: samples per step and process.
        max_tokens_per_batch: instead, the most tokens of a batch; None if batch_size applies.
        caption_dropout_rate: share of the samples whose prompt is replaced by the empty one.
        needs_encoders: whether batches are pixels, which the training step encodes.
        needs_empty_prompt, preserve_prompts: see `Asking`.
        notes: possible mistakes, one line each.
        validation: the held-out samples, as a data module of their own; None if there are none.
        sizes: of each view of a sample; empty if samples are streamed.
        encodings: the folder of the model's cache, for encodings of sample images; None if the encoders stay loaded.
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
        """Make batches meet the demands of an objective, if there is one."""
        if objective is not None:
            self.needs_empty_prompt = objective.needs_empty_prompt
            self.preserve_prompts = objective.preserve_prompts

    @property
    def with_empty_prompt(self) -> bool:
        """Whether training batches contain the empty prompt's conditioning."""
        return self.caption_dropout_rate > 0 or self.needs_empty_prompt

    @property
    @abstractmethod
    def sample_count(self) -> int:
        """Number of samples, without held-out ones."""

    @cached_property
    def fingerprint(self) -> list[Any]:
        """Number of training samples and a hash of their identities, to compare when a run is resumed."""
        known = hashlib.sha256()
        for part in self.identities():
            known.update(f"{part}\n".encode(errors="surrogatepass"))
        return [self.sample_count, known.hexdigest()]

    @abstractmethod
    def identities(self) -> Iterable[object]:
        """Return the facts that distinguish one set of training samples from another."""

    def captions(self) -> Counter[str]:
        """Return the number of samples with each caption; empty if batches do not contain the prompts as text."""
        return Counter()

    @abstractmethod
    def describe(self) -> str:
        """Return the training data in one line, for the summary."""

    @abstractmethod
    def size_counts(self) -> Counter[tuple[int, int]]:
        """Return the number of targets of each (width, height)."""

    @abstractmethod
    def is_uniform(self, prompt_shapes: PromptShapes) -> bool:
        """Return whether all batches are known to have the same shapes before prompts are encoded."""

    @abstractmethod
    def batches_per_epoch(self) -> float:
        """Return this process's batches in an epoch; estimated if the samples' sizes are not known."""

    @abstractmethod
    def train_batches(self) -> Iterable[RawBatch | LatentBatch]:
        """Return this process's batches, on the CPU, without end, from the trainer's position on."""

    @abstractmethod
    def one_by_one(self, which: slice, empty_prompt: bool) -> Iterator[RawBatch | LatentBatch]:
        """Return these samples in order, each as a batch of one.

        Args:
            empty_prompt: whether latent batches include the empty prompt's conditioning.
        """

    @abstractmethod
    def pixels(self, count: int) -> list[RawBatch]:
        """Return the first `count` samples as pixels, each as a batch of one; none if the data is latents only."""

    @abstractmethod
    def examples(self, which: slice, negative_prompt: str | None) -> list[Example]:
        """Return these samples with their images.

        Args:
            negative_prompt: to guide away from; None if it is not needed. A cache contains the conditioning of "" only:
                with another prompt batches are pixels, if there are images.
        """

    def train_dataloader(self) -> Prefetcher:
        return Prefetcher(self.train_batches(), self.run.strategy.root_device)
