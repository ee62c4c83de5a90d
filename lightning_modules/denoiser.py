"""The transformer that trains, as objectives see it: its velocity, and that of its frozen base."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_modules.adapters.peft_layers import without_adapter
from lightning_modules.family import Family
from lightning_modules.prepare import Execution


class Denoiser:
    """Velocities (B, C, h, w) at t (B,), of x_t (B, C, h, w) and of normalized controls, as `Family.velocity` has them.

    Args:
        transformer: gives the one that is loaded.
    """

    def __init__(self, family: Family, execution: Execution, transformer: Callable[[], Any]) -> None:
        self.family = family
        self.execution = execution
        self.transformer = transformer

    def __call__(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        """What the transformer says now."""
        with self.execution.saved_tensors():
            return self.family.velocity(self.transformer(), x_t, t, controls, prompt)

    def turned(self, sign: Tensor) -> AbstractContextManager[None]:
        """Inside, each sample's update by the adapter is times its sign (B,): what was learned, or its opposite."""
        return self.execution.direction.turned(self.transformer(), sign)

    @torch.no_grad()
    def base(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        """What it says without the adapter that trains, and without gradient."""
        with without_adapter(self.transformer()):
            return self.family.velocity(self.transformer(), x_t, t, controls, prompt)
