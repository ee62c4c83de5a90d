"""Pinned host memory for frozen weights, from which they come to a device."""

import logging
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.cuda._pin_memory_utils
from torch import Tensor, nn

log = logging.getLogger("retouch")

# Bytes; where a tensor may begin.
ALIGNMENT = 256


class HostMemory:
    """One piece of the host's memory with room for copies of tensors.

    Args:
        tensors: whose dtypes and shapes the copies have.

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
        """The tensors within the piece, or within a copy of it that may be longer."""
        return [
            piece[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, dtype, shape in self._places
        ]

    def pin(self, device: torch.device) -> None:
        """Pin it for copies to a CUDA device, if that is possible; until it is let go."""
        if device.type == "cuda" and pin(self.piece, device):
            weakref.finalize(self, _unpin, self.piece, device)


def pin(memory: Tensor, device: torch.device) -> bool:
    """Pin memory where it is, for PyTorch's own pinned memory comes in powers of two; whether that was possible."""
    try:
        _register(memory, device)
    except RuntimeError as error:
        _note(f"note: what is offloaded comes slower, for memory cannot be pinned: {error}")
        with suppress(RuntimeError):  # CUDA says once more what has failed, to the next that starts a kernel
            _launch_kernel(device)
        return False
    return True


@cache
def _note(text: str) -> None:
    """A model has many pieces."""
    log.warning(text)


def _register(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda._pin_memory_utils.pin_memory(memory.data_ptr(), memory.nbytes)


def _launch_kernel(device: torch.device) -> None:
    torch.empty(1, device=device).fill_(0)


def _unpin(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way
    torch.cuda._pin_memory_utils.unpin_memory(memory.data_ptr())


def all_weights(module: nn.Module) -> list[Tensor]:
    """A model's parameters, and what quantized layers have beside them."""
    # A QuantizedLinear has parts: importing it would be a circle.
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "parts")]
    return [*module.parameters(), *(part for layer in layers for part in layer.parts())]


class HostCopy:
    """A copy of a frozen model's weights on the host, from which the model comes to a device and goes again.

    The copy is made once and never written.

    Args:
        model: on the device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        found: dict[int, Tensor] = {}
        for tensor in (*all_weights(model), *model.buffers()):
            found.setdefault(tensor.data_ptr(), tensor)
        self._tensors = list(found.values())
        self._host = HostMemory(self._tensors)
        self._host.pin(device)
        for view, tensor in zip(self._views(), self._tensors, strict=True):
            view.copy_(tensor)

    @staticmethod
    def suits(model: nn.Module) -> bool:
        """Return whether all weights are frozen and contiguous."""
        return not any(
            tensor.requires_grad or not tensor.is_contiguous() for tensor in (*all_weights(model), *model.buffers())
        )

    def _views(self) -> list[Tensor]:
        return self._host.views(self._host.piece)

    def offload(self) -> None:
        """Give the device's memory back; nothing is copied."""
        for tensor, view in zip(self._tensors, self._views(), strict=True):
            tensor.data = view

    def load(self, device: torch.device) -> None:
        """Copy the weights to the device."""
        for tensor, view in zip(self._tensors, self._views(), strict=True):
            tensor.data = view.to(device, non_blocking=True, copy=True)
