"""T-LoRA (arXiv 2507.05964): a LoRA whose rank follows the timestep, to learn from one picture or a few."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.lora import ADAPTER, LoRA, lora_layers
from lightning_modules.rank_schedule import RankGate, RankSchedule

WITHOUT_SCHEDULE = "a loader that does not apply rank_schedule uses the full rank at every timestep"


class TLoRA(LoRA):
    """A LoRA whose rank follows the timestep.

    Args:
        min_rank, alpha_rank_scale, rank_schedule: of `RankSchedule`.
        update_masked: whether Adam's momentum and weight decay move a component in steps that did not use it.
        lora: of `LoRA`.
    """

    def __init__(
        self, min_rank: int, alpha_rank_scale: float, rank_schedule: Any, update_masked: bool, **lora: Any
    ) -> None:
        super().__init__(**lora)
        self.schedule = RankSchedule(rank_schedule, self.rank, min_rank, alpha_rank_scale)
        self.gate = RankGate(self.schedule, self.width)
        self.update_masked = update_masked

    def inject(self, transformer: nn.Module) -> None:
        super().inject(transformer)
        self.gate.attach(transformer, ADAPTER)

    def gradient_checkpointing_func(self) -> Callable[..., Any]:
        return self.gate.checkpoint

    def rank_gates(self) -> list[RankGate]:
        return [self.gate]

    def metadata(self) -> dict[str, Any]:
        schedule = {**asdict(self.schedule), "width": self.width, "note": WITHOUT_SCHEDULE}
        return super().metadata() | {"rank_schedule": schedule}

    def before_step(self, optimizer: torch.optim.Optimizer, transformer: nn.Module) -> None:
        if not self.update_masked:
            hold_masked(optimizer, transformer)

    def __str__(self) -> str:
        return f"T-LoRA rank {self.schedule.min_rank} to {self.rank} ({self.schedule.kind})"


def hold_masked(optimizer: torch.optim.Optimizer, transformer: nn.Module) -> None:
    """Leave weights and optimizer state of a component as they are in the coming step if its gradient is zero.

    A masked component's gradient is exactly zero, but Adam would still move it by its momentum, and shrink it.
    """
    before = []
    for layer in lora_layers(transformer, ADAPTER).values():
        down, up = layer.lora_A[ADAPTER].parameters(), layer.lora_B[ADAPTER].parameters()
        # A component is a row of the down projection, and a column of the up projection.
        halves = [(parameter, False) for parameter in down] + [(parameter, True) for parameter in up]
        gradients = [p.grad.T if is_up else p.grad for p, is_up in halves if p.grad is not None]
        if not gradients:  # a layer whose output nobody reads, as in the last block of some models
            continue
        reached = [(gradient != 0).reshape(len(gradient), -1).any(dim=1) for gradient in gradients]
        used = torch.stack(reached).any(dim=0)
        for parameter, is_up in halves:
            where = used if is_up or parameter.ndim == 1 else used[:, None]
            tensors = (parameter.data, *_state_of(optimizer, parameter))
            before += [(tensor, tensor.clone(), where) for tensor in tensors]

    def restore(*_: Any) -> None:
        for tensor, old, where in before:
            tensor.copy_(torch.where(where, tensor, old))
        hook.remove()

    hook = optimizer.register_step_post_hook(restore)


def _state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """The optimizer's tensors, which have a number for each weight, in the weight's shape."""
    state = [tensor for tensor in optimizer.state[parameter].values() if isinstance(tensor, Tensor)]
    state = [tensor for tensor in state if tensor.numel() > 1]
    if any(tensor.numel() != parameter.numel() or not tensor.is_floating_point() for tensor in state):
        raise UserError(
            f"adapter.update_masked=false needs an optimizer that keeps a number for each weight, as optimizer=adamw "
            f"does; {type(optimizer).__name__} does not"
        )
    return [tensor.view_as(parameter) for tensor in state]
