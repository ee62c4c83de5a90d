"""Activations that wait in the host's memory from the forward pass to the backward pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Bytes; what is smaller is not worth a copy.
LEAST = 2**20


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd keeps goes to the host, and comes back one ahead of its turn, beside the computing.

    The last that was kept is needed first: while one is used, the one kept before it is on its way.

    Args:
        weights: stay where they are.
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor], least: int = LEAST) -> None:
        super().__init__(self._pack, self._unpack)
        self.device = device
        self.least = least
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: list[Tensor] = []
        self._arriving: dict[int, tuple[Tensor, Any]] = {}

    def __enter__(self) -> None:
        self._host, self._arriving = [], {}
        super().__enter__()

    def _pack(self, tensor: Tensor) -> Tensor | int:
        """The tensor itself, or the number of its copy."""
        known = tensor.untyped_storage().data_ptr() in self._weights
        if known or tensor.nbytes < self.least or tensor.device != self.device:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._side_stream is not None)
        if self._side_stream is None:
            host.copy_(tensor)
        else:
            self._side_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side_stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._side_stream)
        self._host.append(host)
        return len(self._host) - 1

    def _fetch(self, number: int) -> None:
        """Start to copy one back."""
        if number < 0 or number in self._arriving:
            return
        if self._side_stream is None:
            self._arriving[number] = self._host[number].clone(), None
            return
        with torch.cuda.stream(self._side_stream):
            tensor = self._host[number].to(self.device, non_blocking=True)
            self._arriving[number] = tensor, self._side_stream.record_event()

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch(packed)
        tensor, arrived = self._arriving.pop(packed)
        self._fetch(packed - 1)
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            tensor.record_stream(stream)
        return tensor
