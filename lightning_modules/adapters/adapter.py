"""What trains: the interface of LoRA, T-LoRA and full fine-tuning."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.adapters.rank_mask import RankGate
from lightning_modules.layers import ALIKE, Layers
from lightning_modules.pretrained.frozen_base import FrozenBase


class Training(NamedTuple):
    """What an adapter is trained with.

    Attributes:
        optimizer: called with the trainable parameters; None where it is not known.
        sharded: whether the transformer is split over several GPUs.
        text_sees_images: whether the text encoders see the condition images.
    """

    optimizer: Callable[..., torch.optim.Optimizer] | None
    sharded: bool
    text_sees_images: bool


class Adapter(ABC):
    """What of a pipeline trains, and how it is written for others to load.

    Attributes:
        folder: in the run's folder, where its weights go.
        keeps_steps: whether each saving is kept, or the newest alone.
        dropout: share of a layer's inputs that it does not see, in training.
        trains_text_encoders: whether text is encoded anew in every step.
        trains_base: whether the transformer's own weights train, in float32, and not weights beside them.
        is_linear: whether its update of a layer is a product of two projections and nothing else, so that -1 times what
            the first one gives is the opposite of what was learned, for each sample of a batch alone.
        reads_base: whether it computes with the base's own weights in every step, which must then stay what they are.
        turns_inputs: whether layers get other inputs by it.
    """

    folder: str
    keeps_steps: bool = True
    dropout: float = 0.0
    trains_text_encoders: bool = False
    trains_base: bool = False
    is_linear: bool = False
    reads_base: bool = False
    turns_inputs: bool = False

    @abstractmethod
    def check(self, base: FrozenBase, training: Training) -> None:
        """Raise a UserError for what it cannot be trained with, before any weights are read."""

    @abstractmethod
    def inject(self, part: Any, layers: Layers = ALIKE) -> None:
        """Freeze what stays of a transformer or a text encoder, and let the rest train in float32.

        Args:
            layers: the family's, of a transformer.
        """

    @abstractmethod
    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        """What a checkpoint holds of the transformer or a text encoder, by name."""

    @abstractmethod
    def export(
        self, parts: Mapping[str, nn.Module], base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype
    ) -> Callable[[Path], None]:
        """Gather the weights, in all processes; gives what writes them to a folder, whole or not at all.

        Args:
            parts: what trains, by its name in the repository: the transformer, and text encoders.
            header: what there is to say of their making.
            dtype: of a LoRA's file; a whole pipeline is in the base's.
        """

    def check_exported(self, folder: Path, base: FrozenBase) -> str:
        """Read back what `export` has written, as others will; gives what programs make of it, in words.

        Raises:
            UserError: diffusers would not load it as it is.
        """
        return ""

    @abstractmethod
    def describe(self, trained: Mapping[str, Tensor]) -> str:
        """What trains, for the summary."""

    @abstractmethod
    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        """Settings of predict.py, to use the last weights of a run's folder."""

    @abstractmethod
    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        """Lines of Python that load the weights into diffusers' `pipe`; none where they are a pipeline themselves."""

    def metadata(self) -> dict[str, Any]:
        """What a file's header says of it."""
        return {}

    def bind_rank_mask(self, block: nn.Module) -> Callable[..., Any]:
        """A function that computes a block later with the rank mask of now, for gradient checkpointing."""
        return block

    def rank_gates(self) -> list[RankGate]:
        """What masks the adapter's rank."""
        return []

    def lr_factor(self, name: str) -> float:
        """By how much of optimizer.lr a parameter of this name learns."""
        return 1.0

    @contextmanager
    def in_dtype(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Inside, the weights are as a loader casts them to a base of this dtype; the originals come back."""
        # Others in their places: a parameter whose data change their dtype loses the hooks by which DDP reduces it.
        originals = [
            (module, name, parameter)
            for module in part.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        cast = {
            parameter: nn.Parameter(parameter.detach().to(dtype), requires_grad=False) for _, _, parameter in originals
        }
        for module, name, parameter in originals:  # one that is tied to several modules stays so
            setattr(module, name, cast[parameter])
        try:
            yield
        finally:
            for module, name, parameter in originals:
                setattr(module, name, parameter)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def require_own_rates(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Raise a UserError for an optimizer whose parameters cannot each have a learning rate of their own."""
    made = optimizer([nn.Parameter(torch.ones(64, 64, device="cpu"))])
    group = made.param_groups[0]
    if group["lr"] is None or "d" in group:
        raise UserError(
            f"adapter.lr_pattern and adapter.lora_plus_ratio do not go with {type(made).__name__}, which finds one "
            "learning rate for all: choose another optimizer"
        )
