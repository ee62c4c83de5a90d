"""Exponential moving average (EMA) of the trainable parameters."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from foundation.errors import UserError
from lightning_modules.adapters.peft_layers import full_tensor

# The half-life is at most this share of the samples seen so far, as in the code of arXiv 2312.02696. Until it is
# reached, the average follows a power function of relative standard deviation 0.10 (there, section 3.1), which forgets
# the start.
RAMP_UP = 0.09
KEY = "ema"


class EMA:
    """The average of each trainable parameter, in float32 on its device.

    After each optimizer step, of n samples in all its batches on all processes,

        average += (1 - 0.5 ** (n / h)) * (parameter - average),   h = min(half_life, RAMP_UP * samples so far).

    A step that is skipped, because its gradient is not finite, leaves the average unchanged, and its samples do not
    count. Nothing waits for the GPU: n, h and the weight are tensors there.

    Args:
        half_life: in samples; None for no average.
        sample_with: the weights of sample images and validation: `ema` or `raw`.

    Attributes:
        in_use: whether the parameters are the averages now.
    """

    def __init__(self, half_life: float | None, sample_with: str) -> None:
        if sample_with not in ("ema", "raw"):
            raise UserError(f"ema.sample_with={sample_with}: choose ema or raw")
        self.half_life = half_life
        self.sample_with = sample_with
        self.in_use = False
        self._noted = 0
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._averages: dict[str, Tensor] = {}
        self._samples = torch.zeros((), dtype=torch.int64)
        self._restored: dict[str, Any] | None = None

    @property
    def other(self) -> str:
        """The weights that sample images do not use: `raw` or `ema`."""
        return "raw" if self.sample_with == "ema" else "ema"

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Begin with the present parameters, or with the averages of a loaded checkpoint."""
        self._parameters = parameters
        self._averages = {name: one.detach().clone() for name, one in parameters.items()}
        self._samples = self._samples.to(next(iter(parameters.values())).device)
        if self._restored is not None:
            self._restore(self._restored)

    def note(self, samples: int) -> None:
        """Count the samples of a batch of the current step."""
        self._noted += samples

    @torch.no_grad()
    def after_step(self, finite: Tensor) -> None:
        """Update the averages after an optimizer step.

        Args:
            finite: whether the step was made, on the device.
        """
        samples = torch.full((), self._noted, dtype=torch.int64, device=finite.device) * finite
        self._noted = 0
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(samples)
        self._samples += samples
        half_life = (RAMP_UP * self._samples).clamp(1e-3, self.half_life)  # never 0 / 0
        weight = -torch.expm1(-math.log(2) * samples / half_life)
        averages, parameters = zip(*self._pairs(), strict=True)
        torch._foreach_lerp_(averages, parameters, [weight] * len(averages))

    @contextmanager
    def averages_in_place(self) -> Iterator[None]:
        """Temporarily replace the parameters by their averages; they come back bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self.in_use = not self.in_use
        for average, parameter in self._pairs():
            raw = parameter.clone()
            parameter.copy_(average)
            average.copy_(raw)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each average and its parameter; of sharded ones this process's part."""
        return [(_local(average), _local(self._parameters[name])) for name, average in self._averages.items()]

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the averages to a checkpoint; all processes take part."""
        weights = {name: full_tensor(average) for name, average in self._averages.items()}
        checkpoint[KEY] = {"samples": self._samples, "weights": weights}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume with the averages of a checkpoint, whose adapter has been compared.

        Raises:
            UserError: it contains none.
        """
        if KEY not in checkpoint:
            raise UserError(
                f"ema.half_life={self.half_life:g}: the checkpoint is of a run without an average, which would begin "
                "here. Leave ema.half_life out."
            )
        self._restored = checkpoint[KEY]
        if self._averages:
            self._restore(checkpoint[KEY])

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._samples.copy_(state["samples"])
        for name, average in self._averages.items():
            whole = state["weights"][name]
            if isinstance(average, DTensor):
                placed = whole.to(average.device)
                whole = distribute_tensor(
                    placed, average.device_mesh, average.placements, src_data_rank=None
                ).to_local()
            _local(average).copy_(whole)
        self._restored = None


def _local(tensor: Tensor) -> Tensor:
    """Return a tensor, or this process's part of a sharded one."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
