"""The parts of a pipeline that train, by one adapter: their parameters, and what a checkpoint holds of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from lightning_modules.adapters.adapter import Adapter, trainable
from lightning_modules.pretrained.frozen_base import FrozenBase


class TrainedParts:
    """A transformer and the text encoders that train beside it.

    Args:
        adapter: that was injected into them.
        text_encoders: by their names in the repository.
    """

    def __init__(self, adapter: Adapter, transformer: nn.Module, text_encoders: nn.ModuleDict) -> None:
        self.adapter = adapter
        self.parts = {"transformer": transformer, **dict(text_encoders.items())}

    def parameters(self) -> dict[str, nn.Parameter]:
        """What trains, by name."""
        return {f"{at}.{name}": one for at, part in self.parts.items() for name, one in trainable(part).items()}

    def by_learning_rate(self) -> dict[float, list[nn.Parameter]]:
        """What trains, by the factor of optimizer.lr that it learns by; what learns by lr itself comes first."""
        found: dict[float, list[nn.Parameter]] = {1.0: []}
        for part in self.parts.values():
            for name, parameter in trainable(part).items():
                found.setdefault(self.adapter.lr_factor(name), []).append(parameter)
        return {factor: parameters for factor, parameters in found.items() if parameters}

    def describe(self) -> str:
        """What trains, for the summary."""
        return self.adapter.describe(self.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by the names in an `EditModule`."""
        return {
            f"{at if at == 'transformer' else f'text_encoders.{at}'}.{name}": tensor
            for at, part in self.parts.items()
            for name, tensor in self.adapter.tensors(part).items()
        }

    def reduce_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove all but the trainable tensors from a Lightning checkpoint."""
        names = self.tensors()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}

    @staticmethod
    def restart_window(checkpoint: dict[str, Any], accumulate_grad_batches: int) -> None:
        """Make a Lightning checkpoint resume at the start of an accumulation window of the present length."""
        batches = checkpoint["global_step"] * accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counter in (progress["total"], progress["current"]):
            counter.update(dict.fromkeys(counter, batches))

    def require_same(self, state_dict: Mapping[str, Tensor]) -> None:
        """Raise a UserError for a checkpoint's tensors that are of another adapter."""
        own = {name: tensor.shape for name, tensor in self.tensors().items()}
        stored = {name: tensor.shape for name, tensor in state_dict.items()}
        if own != stored:
            different = sorted(name for name in own.keys() | stored.keys() if own.get(name) != stored.get(name))
            raise UserError(
                f"ckpt_path: the checkpoint's adapter is not this run's; they differ in {listing(different)}. "
                "Use the settings of the run that wrote it (its config.yaml)"
            )

    def export(self, base: FrozenBase, header: Mapping[str, Any], dtype: torch.dtype) -> Callable[[Path], None]:
        """`Adapter.export` of all parts."""
        return self.adapter.export(self.parts, base, header, dtype)

    @contextmanager
    def in_dtype(self, dtype: torch.dtype) -> Iterator[None]:
        """`Adapter.in_dtype` of all parts."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(self.adapter.in_dtype(part, dtype))
            yield
