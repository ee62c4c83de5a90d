"""The transformer as objectives see it: its velocity with the adapter, and the velocity of its frozen base."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_modules.adapters.gate import Gate
from lightning_modules.adapters.peft_layers import ADAPTER, without_adapter
from lightning_modules.adapters.rank_schedule import NUM_TRAIN_TIMESTEPS
from lightning_modules.execution.blocks import compute_dtype
from lightning_modules.family import Family
from lightning_modules.prepare import Execution


class Denoiser:
    """Velocities (B, C, h, w) at t (B,), from x_t (B, C, h, w) and normalized controls, as `Family.velocity`.

    Args:
        family: with the loaded transformer.
    """

    def __init__(self, family: Family, execution: Execution) -> None:
        self.family = family
        self.execution = execution

    def __call__(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        """Predict the velocity with the adapter applied; a T-LoRA has the rank of each sample's t."""
        gates = self.execution.rank_gates
        for gate in gates:
            gate.open(t * NUM_TRAIN_TIMESTEPS, None, compute_dtype(x_t))
        try:
            with self.execution.saved_tensors():
                return self.family.velocity(self.family.transformer, x_t, t, controls, prompt)
        finally:
            for gate in gates:
                gate.factors = None

    def turned(self, sign: Tensor) -> AbstractContextManager[None]:
        """Temporarily multiply each sample's update by its sign (B,): 1, or -1 for its opposite."""
        if self.execution.direction is None:
            self.execution.direction = Gate()
            self.execution.direction.attach(self.family.transformer, ADAPTER)
        return self.execution.direction.using(sign[:, None])

    @torch.no_grad()
    def base(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        """Predict the velocity without the trained adapter and without gradient."""
        with without_adapter(self.family.transformer):
            return self.family.velocity(self.family.transformer, x_t, t, controls, prompt)
