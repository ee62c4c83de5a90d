"""Offloading to host memory: the weights of frozen blocks, and activations between forward and backward pass."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.cuda._pin_memory_utils
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from foundation.notes import note_once
from lightning_modules.quantization.linear import QuantizedLinear

# Byte alignment of tensors within a piece of host memory.
ALIGNMENT = 256
# Bytes; smaller activations are not worth a copy.
LEAST = 2**20


def all_weights(module: nn.Module) -> list[Tensor]:
    """Return a model's parameters and the other parts of its quantized layers."""
    layers = (layer for layer in module.modules() if isinstance(layer, QuantizedLinear))
    return [*module.parameters(), *(part for layer in layers for part in layer.parts())]


def streamed_linears(block: nn.Module) -> list[nn.Linear]:
    """Return the layers whose weights are streamed: the frozen ones, without adapters."""
    return [
        module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name and not module.weight.requires_grad
    ]


class SideStream:
    """Copies on their own CUDA stream, parallel to computing; on other devices each copy is immediate.

    Copies run in the order in which they are requested. Their tensors must not be freed, written or read before a
    `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Copy each source to its target after everything queued by now; return an event to `wait` for."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):  # None changes nothing
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Make computing that is queued from now on wait for a copy; the CPU does not wait."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def uses(self, tensor: Tensor) -> None:
        """Keep a tensor's memory from reuse until the copies requested before its release are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


class HostMemory:
    """A piece of host memory with room for copies of tensors.

    Args:
        tensors: with the dtypes and shapes of the copies.

    Attributes:
        piece: (bytes,), uint8.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._places: list[tuple[int, torch.dtype, torch.Size]] = []
        size = 0
        for tensor in tensors:
            self._places.append((size, tensor.dtype, tensor.shape))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.piece = torch.empty(size, dtype=torch.uint8, device="cpu")

    def views(self, piece: Tensor) -> list[Tensor]:
        """Return the tensors within the piece, or within a copy of it that may be longer."""
        return [
            piece[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, dtype, shape in self._places
        ]

    def pin(self, device: torch.device) -> None:
        """Pin it for copies to a CUDA device, if possible, for as long as it exists.

        It is pinned in place: PyTorch's own pinned memory comes in powers of two.
        """
        if device.type != "cuda":
            return
        try:
            _register(self.piece, device)
        except RuntimeError as error:
            note_once(f"offloaded weights are copied more slowly: memory cannot be pinned: {error}")
            with suppress(RuntimeError):  # CUDA reports the failure again to the next kernel
                _launch_kernel(device)
        else:
            weakref.finalize(self, _unpin, self.piece, device)


def _register(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda._pin_memory_utils.pin_memory(memory.data_ptr(), memory.nbytes)


def _launch_kernel(device: torch.device) -> None:
    torch.empty(1, device=device).fill_(0)


def _unpin(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may be in progress
    torch.cuda._pin_memory_utils.unpin_memory(memory.data_ptr())


class BlockStream:
    """Copies the weights of blocks to the device, one block ahead of the computing.

    Two buffers on the device take turns, each as large as the largest block. A copy into one starts once all work of
    its previous block is queued, and waits for that work on its own stream. This holds in the backward pass too:
    autograd runs the latest nodes first, so a block is finished when the block before it is computed again. Weights are
    frozen, so nothing is copied back. Training needs gradient checkpointing: otherwise a block's backward pass would
    find another block's weights in its buffer.

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
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before(index))
            # always_call: checkpointing leaves a block by an exception as soon as it has recomputed what it needs.
            block.register_forward_hook(self._after(index), always_call=True)

    def _take(self, layers: list[nn.Linear]) -> HostMemory:
        """Move a block's weights into one piece of host memory."""
        host = HostMemory(layer.weight for layer in layers)
        for layer, view in zip(layers, host.views(host.piece), strict=True):
            view.copy_(layer.weight.data)
            layer._parameters["weight"] = None
        return host

    def _fetch(self, index: int) -> int:
        """Start copying a block's weights, unless they are in a buffer; return the buffer's index."""
        if index in self._block_in:
            return self._block_in.index(index)
        slot = (self._slot_in_use + 1) % len(self._buffers)
        piece = self._host[index].piece
        self._block_in[slot] = None
        self._copied[slot] = self._side_stream.copy([piece], [self._buffers[slot][: len(piece)]])
        self._block_in[slot] = index
        return slot

    def _before(self, index: int) -> Callable[..., None]:
        def before(block: nn.Module, args: Any) -> None:
            slot = self._slot_in_use = self._fetch(index)
            self._side_stream.wait(self._copied[slot])
            weights = self._host[index].views(self._buffers[slot])
            for layer, weight in zip(self._layers[index], weights, strict=True):
                layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            if torch._C._current_graph_task_id() != -1:  # in a backward pass
                following = index - 1
            else:
                # Without gradients another forward pass follows; with them the backward pass starts at the last block.
                following = index + 1 if torch.is_grad_enabled() else (index + 1) % len(self._host)
            if 0 <= following < len(self._host) and len(self._buffers) > 1:
                self._fetch(following)

        return before

    def _after(self, index: int) -> Callable[..., None]:
        def after(block: nn.Module, args: Any, output: Any) -> None:
            for layer in self._layers[index]:
                layer._parameters["weight"] = None

        return after


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context in which tensors saved by autograd go to host memory until the backward pass.

    Copies are queued in the order of computing, so no activation stays on the device. A tensor that several nodes save
    is copied to host memory once, and back for each of them.

    Args:
        weights: tensors that stay on the device.
        least: bytes; smaller tensors stay on the device.
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor], least: int = LEAST) -> None:
        super().__init__(self._pack, self._unpack)
        self.device, self.least = device, least
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._sent: dict[Any, Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sent.clear()

    def _pack(self, tensor: Tensor) -> Tensor | tuple[Tensor]:
        """Return the tensor itself if it stays, or its copy in host memory."""
        storage = tensor.untyped_storage()
        if tensor.nbytes < self.least or tensor.device != self.device or storage._cdata in self._weights:
            return tensor
        # The weak reference keeps the storage's address from being reused, but not its memory.
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = StorageWeakRef(storage), tensor._version, layout
        if key not in self._sent:
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.device.type == "cuda")
            self._sent[key] = host.copy_(tensor, non_blocking=True)
        return (self._sent[key],)

    def _unpack(self, packed: Tensor | tuple[Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].to(self.device, non_blocking=True)
