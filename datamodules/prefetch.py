"""Batches prepared ahead of their step: by threads, and on the device."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from datamodules.batch import LatentBatch, RawBatch


@dataclass(eq=False)
class ThreadedLoader:
    """The batches of a sampler, in its order, read ahead by threads.

    Threads suffice: reading and copying release Python's lock, and processes would spend time passing tensors.

    Args:
        threads: 0 reads each batch when it is needed.
    """

    read: Callable[[Any], LatentBatch]
    sampler: Iterable[Any]
    threads: int

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


@dataclass(eq=False)
class Prefetcher:
    """A loader's batches, on the device.

    The trainer fetches each batch before it starts the step of the previous one. To a GPU a batch is copied from pinned
    memory one batch ahead of that, while the GPU computes an earlier step.

    Attributes:
        waited: seconds that the trainer has waited for the loader.
    """

    loader: Iterable[RawBatch | LatentBatch]
    device: torch.device
    waited: float = 0.0

    def __iter__(self) -> Iterator[RawBatch | LatentBatch]:
        if self.device.type != "cuda":
            for batch in self._loaded():
                yield batch.to(self.device)
            return
        side_stream, ahead = torch.cuda.Stream(self.device), deque[tuple[RawBatch | LatentBatch, torch.Event]]()
        for batch in self._loaded():
            with torch.cuda.stream(side_stream):
                ahead.append((batch.to(self.device), side_stream.record_event()))
            if len(ahead) > 1:
                yield self._copied(*ahead.popleft())
        for last in ahead:
            yield self._copied(*last)

    def _loaded(self) -> Iterator[RawBatch | LatentBatch]:
        batches = iter(self.loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def _copied(self, batch: RawBatch | LatentBatch, copied: torch.Event) -> RawBatch | LatentBatch:
        """Make computing that is queued from now on wait for a batch's copy."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)
        for tensor in batch.tensors():  # else their memory is reused while the step still reads it
            tensor.record_stream(stream)
        return batch
