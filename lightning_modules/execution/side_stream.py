"""Copies between a device and the host's memory, beside the computing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Copies on a CUDA stream of their own; elsewhere each is done when it is asked for.

    Copies are done in the order in which they are asked for. Their tensors must not be let go, written or read before
    a `wait`: nothing else says when they are done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def pins(self) -> bool:
        """Whether host memory should be pinned, without which no copy is beside the computing."""
        return self._stream is not None

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Copy each source into its target when all is computed that is queued by now; gives what to `wait` for."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):  # of None nothing
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Let what is computed from now on come after a copy; nothing waits on the host."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def uses(self, tensor: Tensor) -> None:
        """Let a tensor that is freed be no other one's before the copies are done that are asked for by then."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
