"""Batches on their way to the device."""

import time
from collections.abc import Iterable, Iterator

import torch

from datamodules.batch import LatentBatch, RawBatch


class Feed:
    """A loader's batches, on the device.

    The trainer asks for a batch before it takes the step with the one before: to a GPU it is copied from pinned memory
    beside the work that is queued there.

    Attributes:
        waited: seconds that the trainer has waited for the loader.
    """

    def __init__(self, loader: Iterable[RawBatch | LatentBatch], device: torch.device) -> None:
        self.loader = loader
        self.device = device
        self.waited = 0.0

    def __iter__(self) -> Iterator[RawBatch | LatentBatch]:
        side_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        batches = iter(self.loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            if side_stream is None:
                yield batch.to(self.device)
                continue
            with torch.cuda.stream(side_stream):
                batch = batch.to(self.device)
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(side_stream)
            for tensor in batch.tensors():  # or their memory would be given away while the step reads it
                tensor.record_stream(stream)
            yield batch
