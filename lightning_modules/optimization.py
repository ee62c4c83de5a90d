"""The optimizer step: clipping, steps that are skipped, update, EMA."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError, listing
from lightning_modules.adapters.adapter import TrainedParts
from lightning_modules.adapters.peft_layers import full_tensor
from lightning_modules.ema import EMA, KEY

log = logging.getLogger("retouch")

# Libraries whose optimizers work with sharded weights.
TAKE_SHARDS = ("torch", "schedulefree")


@dataclass(eq=False)
class NonfiniteSteps:
    """Skips optimizer steps whose gradient is not finite, without waiting for the GPU if the optimizer allows.

    PyTorch's fused optimizers skip a step on the device if `found_inf` is set; for others each step waits. Either way
    weights, moments and decay stay unchanged. All processes skip the same steps, since they have the same gradients.

    Args:
        most: consecutive skipped steps at which the run stops.
        skipped: the optimizer's groups and their content before the current step, if it is skipped.
    """

    most: int
    _in_a_row: int = 0
    skipped: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _window: list[tuple[list[str], Tensor]] = field(default_factory=list)
    _steps: list[tuple[int, Tensor, list[tuple[list[str], Tensor]]]] = field(default_factory=list)

    def note(self, keys: list[str], losses: Tensor) -> None:
        """Remember the samples of a batch and their losses (B,)."""
        self._window.append((keys, losses))

    def before_step(self, optimizer: Any, step: int, grad_norm: Tensor) -> None:
        """Skip the coming step if its gradient is not finite."""
        self._steps.append((step, grad_norm, self._window))
        self._window = []
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = None, (~torch.isfinite(grad_norm)).float()
        elif not torch.isfinite(grad_norm):  # optimizers skip parameters without a gradient
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            # Schedule-free and Prodigy count steps and average in their groups.
            self.skipped = [(group, {**group}) for group in optimizer.param_groups]

    def report(self) -> None:
        """Log the skipped steps since the last report; waits for the GPU.

        Raises:
            UserError: too many in a row.
        """
        steps, self._steps = self._steps, []
        norms = torch.stack([norm for _, norm, _ in steps]).isfinite().tolist() if steps else []
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


@dataclass(eq=False)
class Optimization:
    """The update of the trainable parameters.

    Args:
        optimizer: called with the trainable parameters.
        scheduler: called with the optimizer; counts optimizer steps.
        max_nonfinite_steps: consecutive steps with a gradient that is not finite at which the run stops.
        ema: the average of the weights; a half_life of None, or None: no average.

    Attributes:
        began_after: the step after which the run began; -1 before its first step.
        grad_norm: norm of the latest step's gradient before clipping, on the device.
        nonfinite: the skipped steps.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler] | None
    max_nonfinite_steps: int
    ema: EMA | None
    began_after: int = -1
    grad_norm: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self.nonfinite = NonfiniteSteps(self.max_nonfinite_steps)
        if self.ema is not None and self.ema.half_life is None:
            self.ema = None

    def describe(self) -> str:
        """Return the optimizer, its learning rate and the schedule in one line."""
        lr = getattr(self.optimizer, "keywords", {}).get("lr")
        name = getattr(self.optimizer, "func", self.optimizer).__name__
        return f"{name}{'' if lr is None else f', lr {lr:g}'}, schedule {self.schedule}"

    @property
    def schedule(self) -> str:
        """The schedule of the learning rate, with its warm-up."""
        keywords = getattr(self.scheduler, "keywords", {})
        name = getattr(getattr(self.scheduler, "func", self.scheduler), "__name__", "constant")
        name, warmup = keywords.get("name", name).removesuffix("_with_warmup"), keywords.get("num_warmup_steps")
        return name + (f" after {warmup} warm-up steps" if warmup else "")

    def check_optimizer(self, own_rates: bool = False) -> None:
        """Raise a UserError for settings that the optimizer refuses, and for an EMA of weights that it averages.

        Args:
            own_rates: whether parameters have different learning rates.
        """
        made = self._make([nn.Parameter(torch.ones(1, 1))])
        group = made.param_groups[0]
        if own_rates and (group["lr"] is None or "d" in group):
            raise UserError(
                f"adapter.lr_pattern, adapter.lora_plus_ratio: {type(made).__name__} finds one learning rate for all "
                "parameters. Choose another optimizer."
            )
        if self.ema is not None and hasattr(made, "eval"):
            raise UserError(
                f"ema.half_life={self.ema.half_life:g}: {type(made).__name__} averages its weights already. Leave "
                "ema.half_life out, or use optimizer=adamw."
            )

    def configure(self, trained: TrainedParts, sharded: bool) -> Any:
        """Return Lightning's `configure_optimizers`; `sharded` weights are split over several GPUs.

        Raises:
            UserError: the optimizer refuses its settings, or sharded weights.
        """
        by_factor = trained.by_learning_rate()
        optimizer = self._make([{"params": group} for group in by_factor.values()])
        if sharded and type(optimizer).__module__.partition(".")[0] not in TAKE_SHARDS:
            raise UserError(
                f"trainer=fsdp: {type(optimizer).__name__} needs whole weights. Use optimizer=adamw or "
                "adamw_schedule_free."
            )
        for group, factor in zip(optimizer.param_groups, by_factor, strict=True):
            if factor != 1.0:
                group["lr"] *= factor
        if hasattr(optimizer, "train"):  # schedule-free
            optimizer.train()
        if self.ema is not None:
            self.ema.start(trained.parameters())
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer=optimizer), "interval": "step"},
        }

    def _make(self, parameters: list[Any]) -> Any:
        try:
            return self.optimizer(parameters)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer: {error}") from error

    def note(self, keys: list[str], losses: Tensor) -> None:
        """Remember the samples of a batch of the current step, and their losses (B,)."""
        self.nonfinite.note(keys, losses)
        if self.ema is not None:
            self.ema.note(len(keys))

    def before_step(
        self, optimizer: torch.optim.Optimizer, step: int, clip_val: float | None, clip_algorithm: str | None
    ) -> None:
        """Clip the gradients, keep their norm, and skip a step whose gradient is not finite.

        Args:
            step: its number, from 1.
            clip_val, clip_algorithm: arguments of Lightning's gradient clipping: `norm` (or None), or `value`.
        """
        self.began_after = step - 1 if self.began_after < 0 else self.began_after
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_norm = clip_algorithm != "value"
        self.grad_norm = full_tensor(nn.utils.clip_grad_norm_(parameters, (by_norm and clip_val) or float("inf")))
        if clip_val and not by_norm:
            nn.utils.clip_grad_value_(parameters, clip_val)
        self.nonfinite.before_step(optimizer, step, self.grad_norm)

    def after_step(self) -> None:
        """Undo a skipped step, and update the EMA."""
        for group, before in self.nonfinite.skipped:
            group.update(before)
        self.nonfinite.skipped = []
        if self.ema is not None:
            self.ema.after_step(torch.isfinite(self.grad_norm))

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add the EMA to a checkpoint; all processes take part."""
        if self.ema is not None:
            self.ema.save(checkpoint)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load the EMA from a checkpoint; the schedule is followed instead (`follow_schedule`).

        Raises:
            UserError: only one of the checkpoint and the run has an EMA.
        """
        checkpoint["lr_schedulers"] = []
        if self.ema is not None:
            self.ema.load(checkpoint)
        elif KEY in checkpoint:
            raise UserError("ckpt_path: the checkpoint is of a run with ema.half_life. Pass the same.")

    @staticmethod
    def follow_schedule(scheduler: Any, steps: int) -> None:
        """Set the learning rates of the configured schedule after this many steps.

        A checkpoint has the rates of the schedule that it was saved with, whose length may differ.

        Args:
            scheduler: at its first step; None for a constant rate.
        """
        if scheduler is None or steps == 0:
            return
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no optimizer step comes between
            for _ in range(steps):
                scheduler.step()

    def is_reported(self, trainer: Any) -> bool:
        """Return whether this step's metrics are copied to the CPU; each copy waits for the GPU."""
        step = trainer.global_step
        return step in (self.began_after + 1, trainer.max_steps) or step % trainer.log_every_n_steps == 0
