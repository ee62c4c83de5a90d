"""The interface of adapters, from LoRA to full fine-tuning, and the trainable parts of a pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError, listing
from lightning_modules.adapters.gates import RankGate
from lightning_modules.family import ALIKE, Layers
from lightning_modules.pretrained.frozen_base import FrozenBase


class Adapter(ABC):
    """The trainable part of a pipeline, and its files.

    Attributes:
        folder: name of its weights' folder in a run.
        dropout: share of a layer's inputs that it drops in training.
        trains_text_encoders: whether prompts are encoded in every step.
        trains_base: whether the transformer's own weights train, in float32; then only the newest are kept.
        is_linear: whether a layer's update is only a product of two projections, so that negating the first one's
            output negates the update, for single samples of a batch.
        adds_to_outputs: whether its updates are added to outputs of layers, whatever the base's weights.
        has_own_rates: whether its parameters have different learning rates.
        rank_gate: the gate that masks its rank; None except for T-LoRA.
    """

    folder: str
    dropout: float = 0.0
    trains_text_encoders: bool = False
    trains_base: bool = False
    is_linear: bool = False
    adds_to_outputs: bool = True
    has_own_rates: bool = False
    rank_gate: RankGate | None = None

    @abstractmethod
    def check(self, base: FrozenBase, sharded: bool, text_sees_images: bool) -> None:
        """Raise a UserError for a base or a setup that it cannot be trained with, before any weights are read.

        Args:
            sharded: whether the transformer is split over several GPUs.
            text_sees_images: whether the text encoders see the condition images.
        """

    @abstractmethod
    def inject(self, part: Any, layers: Layers = ALIKE) -> None:
        """Freeze a transformer or a text encoder, except for trainable parameters in float32."""

    @abstractmethod
    def tensors(self, part: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a transformer or a text encoder that a checkpoint contains, by name."""

    @abstractmethod
    def gather(self, parts: Mapping[str, nn.Module]) -> Any:
        """Collect the weights of `TrainedParts.parts` for `write`; all processes take part."""

    @abstractmethod
    def write(
        self, folder: Path, gathered: Any, base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        """Write gathered weights to a folder, atomically.

        Args:
            header: facts about their origin.
            dtype: dtype of a LoRA's file; a whole pipeline keeps the base's.
        """

    def check_written(self, folder: Path, base: FrozenBase) -> str:
        """Read back what `write` has written, as other programs will; return their verdicts in words."""
        return ""

    @abstractmethod
    def describe(self, trained: Mapping[str, Tensor]) -> str:
        """Describe the trainable parameters for the summary."""

    @abstractmethod
    def predict_arguments(self, run: str, model_name: str) -> dict[str, str]:
        """Return the settings of predict.py that use the last weights of a run's folder."""

    @abstractmethod
    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        """Return lines of Python that load the weights into diffusers' `pipe`; none if they are a whole pipeline."""

    def metadata(self) -> dict[str, Any]:
        """Return its settings for a file's header."""
        return {}

    def lr_factor(self, name: str) -> float:
        """Return the factor of optimizer.lr for a parameter."""
        return 1.0

    @contextmanager
    def in_dtype(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Temporarily cast the weights as a loader does for a base of this dtype; DoRA's magnitudes keep theirs."""
        originals = [
            (module, name, parameter)
            for at, module in part.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and "lora_magnitude_vector" not in at
        ]
        # A parameter shared by several modules stays shared.
        cast = {one: nn.Parameter(one.detach().to(dtype), requires_grad=False) for _, _, one in originals}
        # Replace the parameters: changing .data's dtype would drop DDP's gradient hooks.
        for module, name, parameter in originals:
            setattr(module, name, cast[parameter])
        try:
            yield
        finally:
            for module, name, parameter in originals:
                setattr(module, name, parameter)


class TrainedParts:
    """A transformer and its text encoders, with their trainable parameters and their tensors in a checkpoint.

    Args:
        adapter: the adapter that was injected into them.
        text_encoders: by their names in the repository.
    """

    def __init__(self, adapter: Adapter, transformer: nn.Module, text_encoders: nn.ModuleDict) -> None:
        self.adapter = adapter
        self.parts = {"transformer": transformer, **dict(text_encoders.items())}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{at}.{name}": one for at, part in self.parts.items() for name, one in trainable(part).items()}

    def by_learning_rate(self) -> dict[float, list[nn.Parameter]]:
        """Return the trainable parameters by their factor of optimizer.lr, factor 1 first."""
        found: dict[float, list[nn.Parameter]] = {1.0: []}
        for part in self.parts.values():
            for name, parameter in trainable(part).items():
                found.setdefault(self.adapter.lr_factor(name), []).append(parameter)
        return {factor: parameters for factor, parameters in found.items() if parameters}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by their names in an `EditModule`."""
        return {
            f"{at if at == 'transformer' else f'text_encoders.{at}'}.{name}": tensor
            for at, part in self.parts.items()
            for name, tensor in self.adapter.tensors(part).items()
        }

    def require_same(self, state_dict: Mapping[str, Tensor]) -> None:
        """Raise a UserError if a checkpoint's tensors belong to another adapter."""
        own = {name: tensor.shape for name, tensor in self.tensors().items()}
        stored = {name: tensor.shape for name, tensor in state_dict.items()}
        if different := sorted(name for name in own.keys() | stored.keys() if own.get(name) != stored.get(name)):
            raise UserError(
                f"ckpt_path: the checkpoint's adapter is not this run's; they differ in {listing(different)}. "
                "Use the settings of the run that wrote it (its config.yaml)"
            )

    @contextmanager
    def in_dtype(self, dtype: torch.dtype) -> Iterator[None]:
        """Temporarily cast all parts, by `Adapter.in_dtype`."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(self.adapter.in_dtype(part, dtype))
            yield


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
