"""Batches copied to the device ahead of their step."""

import time
from collections.abc import Iterable, Iterator

import torch

from datamodules.batch import LatentBatch, RawBatch


class Prefetcher:
    """A loader's batches, on the device.

    The trainer fetches each batch before it runs the step of the previous one, so the copy from pinned memory to a
    GPU overlaps with that step.

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
            for tensor in batch.tensors():  # else their memory is reused while the step still reads it
                tensor.record_stream(stream)
            yield batch
