"""A LoRA that counts forwards for some samples of a batch and backwards for others: hooks that turn its sign."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.execution.blocks import with_attribute


class Direction:
    """Stands behind the down projections of the adapter that trains, and multiplies each sample's update by its sign.

    Outside of `turned` the update is as it is.
    """

    def __init__(self) -> None:
        self.sign: Tensor | None = None  # (B,), 1 or -1, while the transformer's forward runs
        self._transformer: Callable[[], nn.Module | None] = lambda: None

    @contextmanager
    def turned(self, transformer: nn.Module, sign: Tensor) -> Iterator[None]:
        """Inside, the transformer computes with these signs (B,)."""
        self._attach(transformer)
        self.sign = sign
        try:
            yield
        finally:
            self.sign = None

    def _attach(self, transformer: nn.Module) -> None:
        """Once: hooks stay, as blocks that are compiled keep those of their first forward."""
        if self._transformer() is transformer:
            return
        self._transformer = weakref.ref(transformer)
        for layer in lora_layers(transformer, ADAPTER).values():
            layer.lora_A[ADAPTER].register_forward_hook(self._turn)

    def _turn(self, down: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """(B, ..., R) -> the same, times each sample's sign."""
        sign = self.sign
        if sign is None:
            return output
        return output * sign.view(-1, *[1] * (output.ndim - 1)).to(output)

    def bind(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """The block with the signs of this moment, whatever runs in between."""
        if self.sign is None or torch.compiler.is_compiling():  # where the graph holds the signs
            return block
        return with_attribute(self, "sign", block)
