"""Host memory: pinned weights, copies on a stream of their own, and returning freed memory to the system."""

import ctypes
import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.cuda._pin_memory_utils
from torch import Tensor, nn

log = logging.getLogger("retouch")

# Byte alignment of tensors within a piece.
ALIGNMENT = 256


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
            _note(f"note: offloaded weights are copied more slowly: memory cannot be pinned: {error}")
            with suppress(RuntimeError):  # CUDA reports the failure again to the next kernel
                _launch_kernel(device)
        else:
            weakref.finalize(self, _unpin, self.piece, device)


@cache
def _note(text: str) -> None:
    """Warn once: a model has many pieces."""
    log.warning(text)


def _register(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda._pin_memory_utils.pin_memory(memory.data_ptr(), memory.nbytes)


def _launch_kernel(device: torch.device) -> None:
    torch.empty(1, device=device).fill_(0)


def _unpin(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may be in progress
    torch.cuda._pin_memory_utils.unpin_memory(memory.data_ptr())


def all_weights(module: nn.Module) -> list[Tensor]:
    """Return a model's parameters and the other parts of its quantized layers."""
    # QuantizedLinear has `parts`; importing it would be a cycle.
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "parts")]
    return [*module.parameters(), *(part for layer in layers for part in layer.parts())]


def return_freed_memory() -> None:
    """Return freed memory to the system.

    glibc keeps freed pieces below a threshold that rises to 32 MB. While a large model is quantized layer by layer they
    would add up to its unquantized size.
    """
    with suppress(OSError, TypeError, AttributeError):  # other C libraries return memory by themselves
        ctypes.CDLL(None).malloc_trim(0)
