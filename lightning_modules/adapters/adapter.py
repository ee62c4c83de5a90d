"""What trains: the interface of LoRA, T-LoRA and full fine-tuning."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
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
    def gather(self, parts: Mapping[str, nn.Module]) -> Any:
        """Collect the trained weights for `write`; all processes take part.

        Args:
            parts: trainable parts by their names in the repository: the transformer, and text encoders.
        """

    @abstractmethod
    def write(
        self, folder: Path, gathered: Any, base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        """Write gathered weights to a folder, atomically.

        Args:
            header: facts about their origin.
            dtype: of a LoRA's file; a whole pipeline keeps the base's.
        """

    def check_written(self, folder: Path, base: FrozenBase) -> str:
        """Read back what `write` has written, as other programs will; return their verdicts in words.

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


class TrainedParts:
    """A transformer and its text encoders, with their trainable parameters and their tensors in a checkpoint.

    Args:
        adapter: the one injected into them.
        text_encoders: by their names in the repository.
    """

    def __init__(self, adapter: Adapter, transformer: nn.Module, text_encoders: nn.ModuleDict) -> None:
        self.adapter = adapter
        self.parts = {"transformer": transformer, **dict(text_encoders.items())}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {f"{at}.{name}": one for at, part in self.parts.items() for name, one in trainable(part).items()}

    def by_learning_rate(self) -> dict[float, list[nn.Parameter]]:
        """Return the trainable parameters by their factor of optimizer.lr, factor 1 first."""
        found: dict[float, list[nn.Parameter]] = {1.0: []}
        for part in self.parts.values():
            for name, parameter in trainable(part).items():
                found.setdefault(self.adapter.lr_factor(name), []).append(parameter)
        return {factor: parameters for factor, parameters in found.items() if parameters}

    def describe(self) -> str:
        """Describe the trainable parameters for the summary."""
        return self.adapter.describe(self.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, by their names in an `EditModule`."""
        return {
            f"{at if at == 'transformer' else f'text_encoders.{at}'}.{name}": tensor
            for at, part in self.parts.items()
            for name, tensor in self.adapter.tensors(part).items()
        }

    def reduce_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove all other tensors from a Lightning checkpoint."""
        names = self.tensors()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}

    @staticmethod
    def restart_window(checkpoint: dict[str, Any], accumulate_grad_batches: int) -> None:
        """Make a Lightning checkpoint resume at the start of an accumulation window of the current length."""
        batches = checkpoint["global_step"] * accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counter in (progress["total"], progress["current"]):
            counter.update(dict.fromkeys(counter, batches))

    def require_same(self, state_dict: Mapping[str, Tensor]) -> None:
        """Raise a UserError if a checkpoint's tensors belong to another adapter."""
        own = {name: tensor.shape for name, tensor in self.tensors().items()}
        stored = {name: tensor.shape for name, tensor in state_dict.items()}
        if own != stored:
            different = sorted(name for name in own.keys() | stored.keys() if own.get(name) != stored.get(name))
            raise UserError(
                f"ckpt_path: the checkpoint's adapter is not this run's; they differ in {listing(different)}. "
                "Use the settings of the run that wrote it (its config.yaml)"
            )

    def gather(self) -> Any:
        """Collect the weights of all parts for `Adapter.write`; all processes take part."""
        return self.adapter.gather(self.parts)

    @contextmanager
    def in_dtype(self, dtype: torch.dtype) -> Iterator[None]:
        """Temporarily cast all parts, by `Adapter.in_dtype`."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(self.adapter.in_dtype(part, dtype))
            yield


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
