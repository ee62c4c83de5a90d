"""Factors of single samples in the adapted layers: hooks after an adapter's down projections."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.execution.blocks import with_attribute


class Gate:
    """Multiplies the outputs of an adapter's down projections by factors of each sample, while there are some.

    Attributes:
        factors: (B, R), or (B, 1) for all components alike; set while the transformer's forward runs.
    """

    def __init__(self) -> None:
        self.factors: Tensor | None = None

    def attach(self, transformer: nn.Module, adapter_name: str) -> None:
        """Register the hooks. They stay: compiled blocks keep the hooks of their first forward."""
        for layer in lora_layers(transformer, adapter_name).values():
            layer.lora_A[adapter_name].register_forward_hook(self._multiply)

    @contextmanager
    def using(self, factors: Tensor) -> Iterator[None]:
        """Temporarily multiply by these factors."""
        self.factors = factors
        try:
            yield
        finally:
            self.factors = None

    def bind(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the block later with the present factors, for gradient checkpointing."""
        if self.factors is None or torch.compiler.is_compiling():  # the graph holds the factors
            return block
        return with_attribute(self, "factors", block)

    def closed(self, output: Tensor) -> Tensor:
        """Return a layer's output where there are no factors."""
        return output

    def _multiply(self, down: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """(B, ..., R) -> (B, ..., R)."""
        factors = self.factors
        if factors is None:
            return self.closed(output)
        if factors.shape[0] not in (1, output.shape[0]):
            # Qwen-Image-Edit-2511 modulates with two rows for each sample: the batch at t, then the batch at 0.
            factors = factors.repeat(output.shape[0] // factors.shape[0], 1)
        if output.ndim != 2:
            factors = factors.view(factors.shape[0], *[1] * (output.ndim - 2), factors.shape[1])
        return output * factors.to(output)
