"""The data of a run, as the model, its callbacks and the trainer see it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, cast

import lightning.pytorch as L
from torch import Tensor

from datamodules.batch import Geometry, PromptRequest
from datamodules.images.windows import ConditionImages

# A prompt and its condition images' (width, height) -> the shape of each tensor of its conditioning.
PromptShapes = Callable[[str, list[tuple[int, int]]], Mapping[str, tuple[int, ...]]]


class Model(Protocol):
    """The part of the model that the data depends on.

    Attributes:
        base: the frozen pipeline, with its name for messages.
        encoder: its encoders; `fingerprint_parts` returns the settings and versions that their outputs depend on.
        objective: None outside of training. `needs_empty_prompt`: batches must contain the empty prompt's conditioning;
            `preserve_prompts`: each sample of a batch gets one of them alongside its own.
    """

    base: Any
    encoder: Any
    objective: Any

    @property
    def condition_images(self) -> ConditionImages: ...

    @property
    def geometry(self) -> Geometry: ...


def model_of(trainer: L.Trainer) -> Model:
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

    def prompt_images(self, paths: Sequence[Path]) -> list[Tensor]:
        """Return the images of a prompt as its text encoder will see them; none if it sees none."""
        return []
