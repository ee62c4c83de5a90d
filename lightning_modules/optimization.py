"""What trains is updated: the optimizer, clipping, steps whose gradient is not finite, averaged weights."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from lightning_modules.adapters.peft_layers import full_tensor

log = logging.getLogger("retouch")

# Libraries whose optimizers take weights that are split over processes.
TAKE_SHARDS = ("torch", "schedulefree")


class Optimization:
    """How weights are updated.

    Args:
        optimizer: called with the trainable parameters.
        scheduler: called with the optimizer; counts optimizer steps.
        max_nonfinite_steps: stop after so many steps in a row whose gradient is not finite.

    Attributes:
        grad_norm: of the latest step, before clipping; on the device.
        nonfinite: the steps that were left out.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler] | None,
        max_nonfinite_steps: int,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.nonfinite = NonfiniteSteps(max_nonfinite_steps)
        self.grad_norm: Tensor | None = None

    def configure(self, parameters: list[nn.Parameter], four_bit: bool, sharded: bool) -> Any:
        """What Lightning's `configure_optimizers` gives.

        Args:
            four_bit: whether the base is quantized to 4 bits.
            sharded: whether the weights are split over several GPUs.

        Raises:
            UserError: the optimizer does not take its settings, or split weights.
        """
        assert self.optimizer is not None
        try:
            optimizer = self.optimizer(parameters)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer: {error}") from error
        if sharded and type(optimizer).__module__.partition(".")[0] not in TAKE_SHARDS:
            raise UserError(
                f"trainer=fsdp does not go with {type(optimizer).__name__}, which needs whole weights: use "
                "optimizer=adamw or adamw_schedule_free"
            )
        if hasattr(optimizer, "train"):  # a schedule-free one
            optimizer.train()
        lr = optimizer.param_groups[0]["lr"]
        finds_its_own = "d" in optimizer.param_groups[0]
        if four_bit and lr > 5e-5 and not finds_its_own:
            log.warning(f"note: optimizer.lr={lr:g} may diverge on a base of 4 bits; 2e-5 was stable")
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"},
        }

    def before_step(
        self, optimizer: torch.optim.Optimizer, step: int, clip_val: float | None, clip_algorithm: str | None
    ) -> None:
        """Clip the gradients, keep their norm, and leave out a step whose gradient is not finite.

        Args:
            step: its number.
            clip_val, clip_algorithm: of Lightning's gradient clipping: `norm` (or None), or `value`.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_norm = clip_algorithm != "value"
        self.grad_norm = full_tensor(nn.utils.clip_grad_norm_(parameters, (by_norm and clip_val) or float("inf")))
        if clip_val and not by_norm:
            nn.utils.clip_grad_value_(parameters, clip_val)
        self.nonfinite.before_step(optimizer, step, self.grad_norm)


@contextmanager
def averaged_weights(module: Any) -> Iterator[None]:
    """Inside, an `EditModule` has the weights to use: those that train, or a schedule-free optimizer's average."""
    optimizer = module.optimizers(use_pl_optimizer=False)
    if not hasattr(optimizer, "eval"):
        yield
        return
    # Its own way back rounds: a saving would change the run.
    originals = {parameter: parameter.data.clone() for parameter in module.trained.parameters().values()}
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        for parameter, data in originals.items():
            parameter.data.copy_(data)


def reads_back(trainer: Any, first_step: int) -> bool:
    """Whether what a step left on the device is read at its end: not in each, for that waits for the device.

    Args:
        first_step: the step that the run began after.
    """
    step = trainer.global_step
    return step in (first_step + 1, trainer.max_steps) or step % trainer.log_every_n_steps == 0


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
