"""Transformer blocks whose frozen weights wait in the host's memory and come to the device for their turn."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from datamodules.errors import UserError


def blocks(transformer: nn.Module) -> dict[str, nn.Module]:
    """Its repeated parts by name, in the order in which they compute."""
    lists = {name: part for name, part in transformer.named_children() if isinstance(part, nn.ModuleList)}
    return {f"{name}.{number}": block for name, part in lists.items() for number, block in enumerate(part)}


def streamed_blocks(transformer: nn.Module, count: int) -> dict[str, nn.Module]:
    """`count` of the blocks, evenly spread: while those between compute, the next one is on its way.

    Raises:
        UserError: there are fewer.
    """
    names = list(found := blocks(transformer))
    if not isinstance(count, int) or not 0 <= count <= len(names):
        raise UserError(f"model.offload.blocks={count}: {type(transformer).__name__} has 0 to {len(names)}")
    chosen = [names[number * len(names) // count] for number in range(count)]
    return {name: found[name] for name in chosen}


class BlockStream:
    """Lets blocks compute on weights that are copied to the device one block ahead, and dropped afterwards.

    Weights are frozen, so nothing is ever copied back. In training it needs gradient checkpointing: else the backward
    pass would keep all copies.

    Args:
        blocks: in the order in which they compute, their linear layers on the CPU.
        device: where they compute.

    Raises:
        UserError: a layer's weights cannot be copied apart from it.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._owners: list[list[nn.Linear]] = []
        self._host: list[list[Tensor]] = []
        self._copies: dict[int, tuple[list[Tensor], Any]] = {}
        for number, block in enumerate(blocks):
            owners = [
                module
                for name, module in block.named_modules()
                if isinstance(module, nn.Linear) and "lora_" not in name and not module.weight.requires_grad
            ]
            if any(is_traceable_wrapper_subclass(owner.weight) for owner in owners):
                raise UserError("model.offload.blocks does not go with model.quantization.backend=quanto or torchao")
            self._owners.append(owners)
            self._host.append([self._pinned(owner.weight.data) for owner in owners])
            self._drop(number)
            block.register_forward_pre_hook(self._before(number))
            # Also where checkpointing leaves a block by an exception, as soon as it has what it wants.
            block.register_forward_hook(self._after(number), always_call=True)

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.side_stream is not None else tensor

    def _fetch(self, number: int) -> None:
        """Start copying a block's weights."""
        if number in self._copies or not 0 <= number < len(self._host):
            return
        if self.side_stream is None:
            self._copies[number] = [tensor.clone() for tensor in self._host[number]], None
            return
        with torch.cuda.stream(self.side_stream):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in self._host[number]]
            self._copies[number] = copies, self.side_stream.record_event()

    def _before(self, number: int) -> Callable[..., None]:
        def before(block: nn.Module, args: Any) -> None:
            self._fetch(number)
            copies, copied = self._copies.pop(number)
            if copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(copied)
                for tensor in copies:
                    tensor.record_stream(stream)
            for owner, tensor in zip(self._owners[number], copies, strict=True):
                owner._parameters["weight"] = nn.Parameter(tensor, requires_grad=False)
            self._copies.clear()  # of another direction
            backwards = torch._C._current_graph_task_id() != -1
            self._fetch(number - 1 if backwards else number + 1)

        return before

    def _after(self, number: int) -> Callable[..., None]:
        def after(block: nn.Module, args: Any, output: Any) -> None:
            self._drop(number)

        return after

    def _drop(self, number: int) -> None:
        for owner in self._owners[number]:
            owner._parameters["weight"] = None
