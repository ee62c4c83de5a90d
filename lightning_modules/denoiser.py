"""The velocity of a module's transformer, as objectives call it: with the adapter, or without it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.adapters.gates import Gate
from lightning_modules.adapters.peft_layers import ADAPTER, without_adapters
from lightning_modules.adapters.rank_schedule import NUM_TRAIN_TIMESTEPS
from lightning_modules.blocks import compute_dtype
from lightning_modules.execution.execution import Execution
from lightning_modules.family import Family


@dataclass(eq=False)
class Denoiser:
    """Velocities (B, C, h, w) at t (B,), from x_t (B, C, h, w) and normalized controls, as `Family.velocity`."""

    family: Family
    execution: Execution

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
        with without_adapters(self.family.transformer):
            return self.family.velocity(self.family.transformer, x_t, t, controls, prompt)
