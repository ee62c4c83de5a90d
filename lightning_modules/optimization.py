"""What trains is updated: the optimizer, clipping, averaged weights."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.adapters.peft_layers import full_tensor
from lightning_modules.adapters.trained import TrainedParts
from lightning_modules.ema import EMA, KEY
from lightning_modules.nonfinite import NonfiniteSteps

log = logging.getLogger("retouch")

# Libraries whose optimizers take weights that are split over processes.
TAKE_SHARDS = ("torch", "schedulefree")


class Optimization:
    """How weights are updated.

    Args:
        optimizer: called with the trainable parameters.
        scheduler: called with the optimizer; counts optimizer steps.
        max_nonfinite_steps: stop after so many steps in a row whose gradient is not finite.
        ema: of `EMA`; None, or a half_life of None, for none.

    Attributes:
        ema: the averages of the weights; None where there are none.
        began_after: the step that the run began after; -1 before its first one.
        grad_norm: of the latest step, before clipping; on the device.
        nonfinite: the steps that were left out.
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler] | None,
        max_nonfinite_steps: int,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.nonfinite = NonfiniteSteps(max_nonfinite_steps)
        self.ema = EMA.of(ema)
        self.began_after = -1
        self.grad_norm: Tensor | None = None

    def describe(self) -> str:
        """Return the optimizer, its learning rate and the schedule in one line."""
        lr = getattr(self.optimizer, "keywords", {}).get("lr")
        name = getattr(getattr(self.optimizer, "func", self.optimizer), "__name__", "no optimizer")
        return f"{name}{'' if lr is None else f', lr {lr:g}'}, schedule {self.schedule}"

    @property
    def schedule(self) -> str:
        """The schedule of the learning rate, with its warm-up."""
        keywords = getattr(self.scheduler, "keywords", {})
        name = getattr(getattr(self.scheduler, "func", self.scheduler), "__name__", "constant")
        name, warmup = keywords.get("name", name).removesuffix("_with_warmup"), keywords.get("num_warmup_steps")
        return name + (f" after {warmup} warm-up steps" if warmup else "")

    def check(self) -> None:
        """Raise a UserError for settings that the optimizer refuses, and for an EMA of weights that it averages."""
        if self.optimizer is None:
            return
        made = self._make([nn.Parameter(torch.ones(1, 1))])
        if self.ema is not None and hasattr(made, "eval"):
            raise UserError(
                f"ema.half_life={self.ema.half_life:g} does not go with {type(made).__name__}, which averages its "
                "weights already: leave ema.half_life out, or use optimizer=adamw"
            )

    def configure(self, trained: TrainedParts, fp4: bool, sharded: bool) -> Any:
        """What Lightning's `configure_optimizers` gives.

        Args:
            trained: what trains.
            fp4: whether the base is quantized to fp4.
            sharded: whether the weights are split over several GPUs.

        Raises:
            UserError: the optimizer does not take its settings, or split weights.
        """
        by_factor = trained.by_learning_rate()
        optimizer = self._make([{"params": group} for group in by_factor.values()])
        if sharded and type(optimizer).__module__.partition(".")[0] not in TAKE_SHARDS:
            raise UserError(
                f"trainer=fsdp does not go with {type(optimizer).__name__}, which needs whole weights: use "
                "optimizer=adamw or adamw_schedule_free"
            )
        for group, factor in zip(optimizer.param_groups, by_factor, strict=True):
            if factor != 1.0:
                group["lr"] *= factor
        if hasattr(optimizer, "train"):  # a schedule-free one
            optimizer.train()
        if self.ema is not None:
            self.ema.start(trained.parameters())
        lr = optimizer.param_groups[0]["lr"]
        finds_its_own = "d" in optimizer.param_groups[0]
        if fp4 and lr > 5e-5 and not finds_its_own:
            log.warning(f"note: optimizer.lr={lr:g} may diverge on a base in fp4; 2e-5 was stable")
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer=optimizer), "interval": "step"},
        }

    def _make(self, parameters: list[Any]) -> Any:
        assert self.optimizer is not None
        try:
            return self.optimizer(parameters)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer: {error}") from error

    def note(self, keys: list[str], losses: Tensor) -> None:
        """The samples of a batch of the step that is under way, and their losses (B,)."""
        self.nonfinite.note(keys, losses)
        if self.ema is not None:
            self.ema.note(len(keys))

    def before_step(
        self, optimizer: torch.optim.Optimizer, step: int, clip_val: float | None, clip_algorithm: str | None
    ) -> None:
        """Clip the gradients, keep their norm, and leave out a step whose gradient is not finite.

        Args:
            step: its number.
            clip_val, clip_algorithm: of Lightning's gradient clipping: `norm` (or None), or `value`.
        """
        self.began_after = step - 1 if self.began_after < 0 else self.began_after
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        by_norm = clip_algorithm != "value"
        self.grad_norm = full_tensor(nn.utils.clip_grad_norm_(parameters, (by_norm and clip_val) or float("inf")))
        if clip_val and not by_norm:
            nn.utils.clip_grad_value_(parameters, clip_val)
        self.nonfinite.before_step(optimizer, step, self.grad_norm)

    def after_step(self) -> None:
        """Called when the weights are those of the next step."""
        if self.ema is not None:
            assert self.grad_norm is not None
            self.ema.after_step(torch.isfinite(self.grad_norm))

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Put into a checkpoint what Lightning does not know of; all processes take part."""
        if self.ema is not None:
            self.ema.save(checkpoint)

    @staticmethod
    def follow_schedule(scheduler: Any, steps: int) -> None:
        """Set the learning rates to those of the configured schedule after this many steps.

        The checkpoint restores the rates of the schedule it was saved with, which may have had another length.

        Args:
            scheduler: at its first step; None for a constant rate.
        """
        if scheduler is None or steps == 0:
            return
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no step of the optimizer comes between
            for _ in range(steps):
                scheduler.step()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load the EMA from a checkpoint; the schedule is not restored but followed.

        Raises:
            UserError: only one of the checkpoint and the run has an EMA.
        """
        checkpoint["lr_schedulers"] = []
        if self.ema is not None:
            self.ema.load(checkpoint)
        elif KEY in checkpoint:
            raise UserError("ckpt_path: the checkpoint is of a run with ema.half_life: give that run's")


@contextmanager
def averaged_weights(module: Any, other: bool = False) -> Iterator[None]:
    """Inside, an `EditModule` has the weights to use: those that train, or their average.

    The average is that of `EMA`, where it is to be sampled with, or of a schedule-free optimizer.

    Args:
        other: of a run with an EMA, use the other of the two.
    """
    optimizer, ema = module.optimizers(use_pl_optimizer=False), module.optimization.ema
    with ExitStack() as stack:
        if module.device_mesh is not None:
            from lightning_modules.execution.fsdp import gather_anew

            gather_anew(module.transformer)
            stack.callback(gather_anew, module.transformer)
        if ema is not None and (ema.sample_with == "ema") != other:
            stack.enter_context(ema.averages_in_place())
        elif hasattr(optimizer, "eval"):
            stack.enter_context(_average_of(optimizer, module.trained.parameters().values()))
        yield


@contextmanager
def _average_of(optimizer: Any, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, the parameters are a schedule-free optimizer's average."""
    # Its own way back rounds: a saving would change the run.
    originals = {parameter: parameter.data.clone() for parameter in parameters}
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
