"""Batches prepared ahead of their step: by threads, and on the device."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from datamodules.batch import LatentBatch, RawBatch


class ThreadedLoader:
    """The batches of a sampler, in its order, read ahead by threads.

    Threads suffice: reading and copying release Python's lock, and processes would spend time passing tensors.

    Args:
        threads: 0 reads each batch when it is needed.
    """

    def __init__(self, read: Callable[[Any], LatentBatch], sampler: Iterable[Any], threads: int) -> None:
        self.read = read
        self.sampler = sampler
        self.threads = threads

    def __iter__(self) -> Iterator[LatentBatch]:
        waiting: deque[Future[LatentBatch]] = deque()
        with ThreadPoolExecutor(max(1, self.threads), thread_name_prefix="shards") as pool:
            try:
                for entry in self.sampler:
                    waiting.append(pool.submit(self.read, entry))
                    if len(waiting) > 2 * self.threads:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


class Prefetcher:
    """A loader's batches, on the device.

    The trainer fetches each batch before it starts the step of the previous one, so the copy from pinned memory to a
    GPU overlaps with the step before that, which the GPU still computes.

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
