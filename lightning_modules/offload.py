"""Transformer blocks whose frozen weights wait in the host's memory and come to the device for their turn."""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.cuda._pin_memory_utils
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from datamodules.errors import UserError

log = logging.getLogger("retouch")

# Bytes; where a weight may begin within a block's buffer.
ALIGNMENT = 256


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


def streamed_linears(block: nn.Module) -> list[nn.Linear]:
    """The layers whose weights a block's stream carries: all that are frozen, adapters aside."""
    return [
        module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name and not module.weight.requires_grad
    ]


def _pin(host: Tensor) -> bool:
    """Pin memory where it is, for PyTorch's own pinned memory comes in powers of two; whether that was possible."""
    try:
        torch.cuda._pin_memory_utils.pin_memory(host.data_ptr(), host.nbytes)
    except RuntimeError as error:
        log.warning(f"note: offloaded blocks come slower, for memory cannot be pinned: {error}")
        return False
    return True


def _unpin(side_stream: torch.cuda.Stream, pinned: list[Tensor]) -> None:
    side_stream.synchronize()  # a copy may be under way
    for host in pinned:
        torch.cuda._pin_memory_utils.unpin_memory(host.data_ptr())


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

    Raises:
        UserError: a layer's weights cannot be copied apart from it.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._layers = [streamed_linears(block) for block in blocks]
        if any(is_traceable_wrapper_subclass(layer.weight) for layers in self._layers for layer in layers):
            raise UserError("model.offload.blocks does not go with model.quantization.backend=quanto or torchao")
        self._host: list[Tensor] = []
        self._places: list[list[tuple[int, torch.dtype, torch.Size]]] = []
        for layers in self._layers:
            self._take(layers)
        size, count = max(len(host) for host in self._host), min(2, len(blocks))
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._block_in: list[int | None] = [None] * count
        self._slot_in_use = count - 1
        self._copied: list[Any] = [None] * count
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._side_stream is not None:
            for buffer in self._buffers:
                buffer.record_stream(self._side_stream)
            with torch.cuda.device(device):
                pinned = [host for host in self._host if _pin(host)]
            weakref.finalize(self, _unpin, self._side_stream, pinned)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before(number))
            # Also where checkpointing leaves a block by an exception, as soon as it has what it wants.
            block.register_forward_hook(self._after(number), always_call=True)

    def _take(self, layers: list[nn.Linear]) -> None:
        """Move a block's weights into one piece of host memory."""
        places, size = [], 0
        for layer in layers:
            places.append((size, layer.weight.dtype, layer.weight.shape))
            size += -(-layer.weight.nbytes // ALIGNMENT) * ALIGNMENT
        host = torch.empty(size, dtype=torch.uint8)
        for layer, (start, _, _) in zip(layers, places, strict=True):
            weight = layer.weight.data.contiguous().view(torch.uint8).flatten()
            host[start : start + len(weight)] = weight
            layer._parameters["weight"] = None
        self._host.append(host)
        self._places.append(places)

    def _fetch(self, number: int) -> int:
        """Start copying a block's weights, unless a buffer has or is getting them; gives that buffer's number."""
        if number in self._block_in:
            return self._block_in.index(number)
        slot = (self._slot_in_use + 1) % len(self._buffers)
        host, buffer = self._host[number], self._buffers[slot]
        self._block_in[slot] = None
        if self._side_stream is None:
            buffer[: len(host)].copy_(host)
        else:
            self._side_stream.wait_stream(torch.cuda.current_stream(buffer.device))
            with torch.cuda.stream(self._side_stream):
                buffer[: len(host)].copy_(host, non_blocking=True)
                self._copied[slot] = self._side_stream.record_event()
        self._block_in[slot] = number
        return slot

    def _before(self, number: int) -> Callable[..., None]:
        def before(block: nn.Module, args: Any) -> None:
            slot = self._slot_in_use = self._fetch(number)
            buffer = self._buffers[slot]
            if self._copied[slot] is not None:
                torch.cuda.current_stream(buffer.device).wait_event(self._copied[slot])
            for layer, (start, dtype, shape) in zip(self._layers[number], self._places[number], strict=True):
                weight = buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
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
