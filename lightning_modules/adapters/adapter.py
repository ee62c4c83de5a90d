"""What trains: the interface of LoRA, T-LoRA and full fine-tuning."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_modules.adapters.rank_mask import RankGate
    from lightning_modules.edit_module import EditModule


class Adapter(ABC):
    """What of a pipeline trains, and how it is written for others to load.

    Attributes:
        folder: of the run's folder, where its weights go.
        keeps_steps: whether each saving is kept, or the newest alone.
        dropout: share of a layer's inputs that it does not see, in training.
        trains_text_encoders: whether text is encoded anew in every step.
    """

    folder: str
    keeps_steps: bool = True
    dropout: float = 0.0
    trains_text_encoders: bool = False

    @abstractmethod
    def preflight(self, module: "EditModule") -> None:
        """Raise a UserError for what it cannot be trained with, before any weights are read."""

    @abstractmethod
    def inject(self, transformer: nn.Module) -> None:
        """Freeze what stays, and let the rest train in float32."""

    @abstractmethod
    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        """What a checkpoint holds of the transformer or a text encoder, by name."""

    @abstractmethod
    def export(self, module: "EditModule", header: Mapping[str, Any]) -> Callable[[Path], None]:
        """Gather the weights, in all processes; gives what writes them to a folder, whole or not at all.

        Args:
            header: what there is to say of their making.
        """

    @abstractmethod
    def describe(self, trained: Mapping[str, Tensor]) -> str:
        """What trains, for the summary."""

    @abstractmethod
    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        """Settings of predict.py, to use the last weights of a run's folder."""

    @abstractmethod
    def loading_code(self, weights: str) -> list[str]:
        """Lines of Python that load the weights into diffusers' `pipe`; none where they are a pipeline themselves."""

    def metadata(self) -> dict[str, Any]:
        """What a file's header says of it."""
        return {}

    def as_now(self, block: nn.Module) -> Callable[..., Any]:
        """What computes a block later as it would now, for gradient checkpointing."""
        return block

    def rank_gates(self) -> "list[RankGate]":
        """What masks the adapter's rank."""
        return []

    def before_step(self, optimizer: torch.optim.Optimizer, transformer: nn.Module) -> None:
        """Called when the gradients of an optimizer step are there."""
        return

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
