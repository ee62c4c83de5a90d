"""Optimizer steps whose gradient is not finite."""

import logging
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError, listing

log = logging.getLogger("retouch")


class NonfiniteSteps:
    """Leaves such steps out, without waiting for the device where the optimizer allows.

    PyTorch's fused optimizers pass over a step on the device itself, where `found_inf` says so; for others each step
    waits to know. Either way weights, moments and decay stay as they were. After a backward pass over several processes
    the gradients are the same in all, so all of them decide alike.

    Args:
        most: how many in a row are too many.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._in_a_row = 0
        self._window: list[tuple[list[str], Tensor]] = []
        self._steps: list[tuple[int, Tensor, list[tuple[list[str], Tensor]]]] = []

    def note(self, keys: list[str], losses: Tensor) -> None:
        """The samples of a batch and their losses (B,)."""
        self._window.append((keys, losses))

    def before_step(self, optimizer: Any, step: int, grad_norm: Tensor) -> None:
        """Called when the gradients of an optimizer step are there."""
        self._steps.append((step, grad_norm, self._window))
        self._window = []
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = None, (~torch.isfinite(grad_norm)).float()
        elif not torch.isfinite(grad_norm):  # optimizers pass over parameters without a gradient
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def report(self) -> None:
        """Say which of the steps since the last report were left out; waits for the device.

        Raises:
            UserError: too many in a row.
        """
        steps, self._steps = self._steps, []
        norms = torch.stack([norm for _, norm, _ in steps]).isfinite().tolist() if steps else []
        samples = ""
        for (step, _, window), finite in zip(steps, norms, strict=True):
            if finite:
                self._in_a_row = 0
                continue
            losses = [(key, loss) for keys, values in window for key, loss in zip(keys, values.tolist(), strict=True)]
            bad = [key for key, loss in losses if not abs(loss) < float("inf")]
            samples = f"the loss of {listing(bad)}" if bad else f"the gradient of {listing([key for key, _ in losses])}"
            log.warning(f"step {step} is skipped: {samples} is not finite")
            self._in_a_row += 1
            if self._in_a_row >= self.most:
                raise UserError(
                    f"{self._in_a_row} steps in a row were not finite, the last in {samples}: look at these samples, "
                    "lower optimizer.lr, or start again from an earlier checkpoint"
                )
