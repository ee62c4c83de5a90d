"""Transformer blocks whose frozen weights wait in the host's memory and come to the device for their turn."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from datamodules.errors import UserError
from lightning_modules.execution.blocks import blocks
from lightning_modules.execution.host_memory import HostMemory
from lightning_modules.execution.side_stream import SideStream


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


def streamed_linears(block: nn.Module) -> list[nn.Linear]:
    """The layers whose weights a block's stream carries: all that are frozen, adapters aside."""
    return [
        module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name and not module.weight.requires_grad
    ]


class BlockStream:
    """Lets blocks compute on weights that are copied to the device one block ahead.

    Two buffers on the device take turns, each as large as the largest block. A copy into one begins when all that its
    block had to compute is queued, and waits for that on a stream of its own. In the backward pass, too: autograd runs
    the latest nodes first, so that of a block nothing is left when the block before it is computed again.
    Weights are frozen, so nothing is ever copied back. In training it needs gradient checkpointing: else the backward
    pass of a block would come when its buffer holds another one's weights.

    Args:
        blocks: in the order in which they compute, their linear layers on the CPU.
        device: where they compute.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._layers = [streamed_linears(block) for block in blocks]
        self._host = [self._take(layers) for layers in self._layers]
        for host in self._host:
            host.pin(device)
        size, count = max(len(host.piece) for host in self._host), min(2, len(blocks))
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._block_in: list[int | None] = [None] * count
        self._slot_in_use = count - 1
        self._copied: list[Any] = [None] * count
        self._side_stream = SideStream(device)
        for buffer in self._buffers:
            self._side_stream.uses(buffer)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before(number))
            # Also where checkpointing leaves a block by an exception, as soon as it has what it wants.
            block.register_forward_hook(self._after(number), always_call=True)

    def _take(self, layers: list[nn.Linear]) -> HostMemory:
        """Move a block's weights into one piece of host memory."""
        host = HostMemory(layer.weight for layer in layers)
        for layer, view in zip(layers, host.views(host.piece), strict=True):
            view.copy_(layer.weight.data)
            layer._parameters["weight"] = None
        return host

    def _fetch(self, number: int) -> int:
        """Start copying a block's weights, unless a buffer has or is getting them; gives that buffer's number."""
        if number in self._block_in:
            return self._block_in.index(number)
        slot = (self._slot_in_use + 1) % len(self._buffers)
        piece = self._host[number].piece
        self._block_in[slot] = None
        self._copied[slot] = self._side_stream.copy([piece], [self._buffers[slot][: len(piece)]])
        self._block_in[slot] = number
        return slot

    def _before(self, number: int) -> Callable[..., None]:
        def before(block: nn.Module, args: Any) -> None:
            slot = self._slot_in_use = self._fetch(number)
            self._side_stream.wait(self._copied[slot])
            weights = self._host[number].views(self._buffers[slot])
            for layer, weight in zip(self._layers[number], weights, strict=True):
                layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            if torch._C._current_graph_task_id() != -1:  # in a backward pass
                following = number - 1
            else:
                # Without gradients another forward pass follows; with them the backward pass begins where this ends.
                following = number + 1 if torch.is_grad_enabled() else (number + 1) % len(self._host)
            if 0 <= following < len(self._host) and len(self._buffers) > 1:
                self._fetch(following)

        return before

    def _after(self, number: int) -> Callable[..., None]:
        def after(block: nn.Module, args: Any, output: Any) -> None:
            for layer in self._layers[number]:
                layer._parameters["weight"] = None

        return after
