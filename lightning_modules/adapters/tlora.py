"""T-LoRA (arXiv 2507.05964): a LoRA whose rank follows the timestep, to learn from one picture or a few."""

from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from lightning_modules.adapters.adapter import dummy_optimizer_step
from lightning_modules.adapters.lora import LoRA
from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.adapters.rank_mask import RANK_MASK_CALLBACKS, RankGate
from lightning_modules.adapters.rank_schedule import RankSchedule
from lightning_modules.layers import ALIKE, Layers

WITHOUT_SCHEDULE = "a loader that does not apply rank_schedule uses the full rank at every timestep"


class TLoRA(LoRA):
    """A LoRA whose rank follows the timestep.

    Args:
        min_rank, alpha_rank_scale, rank_schedule: of `RankSchedule`.
        update_masked: whether Adam's momentum and weight decay move a component in steps that did not use it.
        lora: of `LoRA`.
    """

    callbacks = RANK_MASK_CALLBACKS

    def __init__(
        self, min_rank: int, alpha_rank_scale: float, rank_schedule: Any, update_masked: bool, **lora: Any
    ) -> None:
        super().__init__(**lora)
        if self.ranks.rank_pattern:
            raise UserError("adapter.rank_pattern does not go with a T-LoRA, whose schedule is of one rank")
        self.schedule = RankSchedule(rank_schedule, self.rank, min_rank, alpha_rank_scale)
        self.gate = RankGate(self.schedule, self.width)
        self.update_masked = update_masked
        self._hold: HoldMasked | None = None

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        super().inject(transformer, layers)
        self.gate.attach(transformer, ADAPTER)

    def resolve_targets(self, transformer: nn.Module, layers: Layers) -> list[str]:
        targets = super().resolve_targets(transformer, layers)
        if unmaskable := [name for name in targets if any(fnmatchcase(name, one) for one in layers.flattened)]:
            raise UserError(
                f"adapter.target_modules: {listing(unmaskable)} sees the tokens of a whole batch as one row, where a "
                "T-LoRA cannot tell samples apart: leave it out"
            )
        return targets

    def bind_rank_mask(self, block: nn.Module) -> Callable[..., Any]:
        return self.gate.bind_rank_mask(block)

    def rank_gates(self) -> list[RankGate]:
        return [self.gate]

    def metadata(self) -> dict[str, Any]:
        schedule = {**asdict(self.schedule), "width": self.width, "note": WITHOUT_SCHEDULE}
        return super().metadata() | {"rank_schedule": schedule}

    def loading_code(self, weights: str, pipeline_name: str) -> list[str]:
        return [
            *super().loading_code(weights, pipeline_name),
            "from lightning_modules.adapters.rank_mask import attach_rank_schedule",
            f"attach_rank_schedule(pipe, {weights!r})",
        ]

    def check_optimizer(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        if not self.update_masked:
            state_of(*dummy_optimizer_step(optimizer, 64, 64))  # smaller ones have simpler states

    def before_step(self, optimizer: torch.optim.Optimizer, transformer: nn.Module) -> None:
        if self.update_masked:
            return
        if self._hold is None or self._hold.optimizer is not optimizer:
            self._hold = HoldMasked(optimizer, transformer)
        self._hold.remember()

    def __str__(self) -> str:
        return f"T-LoRA rank {self.schedule.min_rank} to {self.rank} ({self.schedule.kind})"


class HoldMasked:
    """Leaves weights and optimizer state of a component as they are in each step in which its gradient is zero.

    A masked component's gradient is exactly zero, but Adam would still move it by its momentum, and shrink it. During a
    step there is a copy of the adapter and of the optimizer's state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, transformer: nn.Module) -> None:
        self.optimizer = optimizer
        self._layers = list(lora_layers(transformer, ADAPTER).values())
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        optimizer.register_step_post_hook(self._restore)

    def remember(self) -> None:
        """Called when the gradients of a step are there."""
        for layer in self._layers:
            # A component is a row of the down projection, and a column of the up projection.
            halves = [
                (parameter, is_up)
                for half, is_up in ((layer.lora_A[ADAPTER], False), (layer.lora_B[ADAPTER], True))
                for parameter in half.parameters()
                if parameter.grad is not None
            ]
            if not halves:  # a layer whose output nobody reads, as in the last block of some models
                continue
            gradients = [(p.grad.T if is_up else p.grad) != 0 for p, is_up in halves]
            used = [gradient.reshape(len(gradient), -1).any(dim=1) for gradient in gradients]
            reached = torch.stack(used).any(dim=0)
            for parameter, is_up in halves:
                where = reached if is_up or parameter.ndim == 1 else reached[:, None]
                tensors = (parameter.data, *state_of(self.optimizer, parameter))
                self._before += [(tensor, tensor.clone(), where) for tensor in tensors]

    def _restore(self, *_: Any) -> None:
        for tensor, old, where in self._before:
            tensor.copy_(torch.where(where, tensor, old))
        self._before.clear()


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """The optimizer's tensors, which have a number for each weight, in the weight's shape.

    Raises:
        UserError: some have not, as in optimizers whose state is quantized or factored.
    """
    state = [tensor for tensor in optimizer.state[parameter].values() if isinstance(tensor, Tensor) and tensor.ndim > 0]
    if any(tensor.numel() != parameter.numel() or not tensor.is_floating_point() for tensor in state):
        raise UserError(
            "adapter.update_masked=false needs an optimizer that keeps a number for each weight, as adamw and prodigy "
            f"do; {type(optimizer).__name__} does not"
        )
    return [tensor.view_as(parameter) for tensor in state]
