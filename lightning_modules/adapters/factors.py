"""What updates that are no LoRA have in common."""

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor

from lightning_modules.adapters.low_rank import LowRank, best_of_rank
from lightning_modules.adapters.update import Update


class Factors(Update):
    """An `Update` that is computed beside its layer; the parts that follow from its tensors and its matrix."""

    @property
    def unwritable(self) -> str:
        return ""

    def like(self, tensors: Mapping[str, Tensor]) -> Self:
        return self.of(tensors)

    def beside(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What a layer gives with the update: (..., in) -> (..., out)."""
        y = layer(x)
        return y + self.apply(self.cast(x)).to(y.dtype)

    def cast(self, x: Tensor) -> Tensor:
        """An input in the dtype of the tensors, unless autocast brings both to one."""
        device = x.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        return x if autocast else x.to(next(iter(self.tensors().values())).dtype)

    def to(self, dtype: torch.dtype) -> Self:
        return self.like({name: tensor.to(dtype) for name, tensor in self.tensors().items()})

    def copy(self) -> Self:
        """The same, of tensors of its own."""
        return self.like({name: tensor.clone() for name, tensor in self.tensors().items()})

    def on(self, device: torch.device) -> Self:
        """The same on another device, in float32."""
        return self.like({name: tensor.to(device, torch.float32) for name, tensor in self.tensors().items()})

    def updated(self, weight: Tensor) -> Tensor:
        return weight.float() + self.on(weight.device).delta()

    def square(self) -> float:
        return float(self.delta().double().square().sum())

    def reduced(self, rank: int) -> LowRank:
        delta = self.delta()
        update, _ = best_of_rank(delta, min(rank, *delta.shape))
        return update
