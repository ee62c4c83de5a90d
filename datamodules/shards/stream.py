"""Remote shards, read in a shuffled order and collected into batches without end."""

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Full, Queue

import safetensors.torch
import webdataset as wds
from torch import Tensor

from datamodules.batch import LatentBatch, stack_padded
from datamodules.images.framing import Size
from datamodules.sampler import drawn_caption
from datamodules.shards.reader import latent_batch
from datamodules.shards.remote import Shard, read_groups
from datamodules.shards.tar import Row, size_of


@dataclass
class Item:
    """A sample from a stream.

    Attributes:
        id: of its row; a sample has several, where there are several views of it.
        prompts: the conditioning of each of its captions.
        empty_id: the id of its empty prompt's conditioning, which samples may share.
    """

    id: str
    key: str
    tensors: dict[str, Tensor]
    prompts: list[dict[str, Tensor]]
    empty_prompt: dict[str, Tensor]
    empty_id: str


def collate(items: list[Item], draws: list[int], seed: int | None, preserve_empty: bool = False) -> LatentBatch:
    """The batch of samples of one size.

    Args:
        seed: and the draws choose their captions; None for the first.
        preserve_empty: whether the empty prompt is what each has beside its own.
    """
    drawn = zip(items, draws, strict=True)
    prompts = [item.prompts[drawn_caption(seed, draw, len(item.prompts))] for item, draw in drawn]
    empty = [item.empty_prompt for item in items]
    preserved = stack_padded(empty) if preserve_empty else {}
    if len({item.empty_id for item in items}) == 1:
        empty = empty[:1]
    tensors, prompt, empty_prompt = map(stack_padded, ([i.tensors for i in items], prompts, empty))
    batch = latent_batch([item.key for item in items], draws, tensors, prompt, empty_prompt)
    batch.preserve_prompt = preserved
    return batch


class ShardStream:
    """Batches of one size, without end, by WebDataset.

    In each epoch the shards are shuffled and dealt out to all workers of all processes in turn, so any number of
    shards suits any number of workers. The samples that a worker reads pass through a shuffle buffer.

    Args:
        limit: how many samples with this number of tokens make a batch.
        shuffle_buffer: samples in the buffer of each worker.
        rank, world_size: of this process.
        start: batches of this process before the run was resumed; part of the seed of the order.
        empty_prompt: whether batches include the empty prompt's conditioning.
        stride: the most samples of a batch: each batch has so many numbers of draws.
        preserve_empty: of `collate`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        limit: Callable[[int], int],
        shuffle_buffer: int,
        seed: int,
        rank: int,
        world_size: int,
        start: int,
        empty_prompt: bool,
        stride: int,
        preserve_empty: bool = False,
    ) -> None:
        self.shards = list(shards)
        self.limit = limit
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start = start
        self.preserve_empty = preserve_empty
        self.empty_prompt = empty_prompt or preserve_empty
        self.stride = stride

    def batches(self, worker: int, workers: int, stopped: threading.Event) -> Iterator[LatentBatch]:
        """The batches of one worker, until `stopped` is set; workers take turns.

        All randomness of a sample is a function of the seed and the number of its draw.
        """
        numbers = itertools.count(self.start + worker, workers)
        for items, number in zip(self._groups(worker, workers, stopped), numbers, strict=False):
            first = (number * self.world_size + self.rank) * self.stride
            yield collate(items, list(range(first, first + len(items))), self.seed, self.preserve_empty)

    def _groups(self, worker: int, workers: int, stopped: threading.Event) -> Iterator[list[Item]]:
        """The samples of each batch of one worker."""
        place, places = self.rank * workers + worker, self.world_size * workers
        samples = self._samples(place, places, stopped)
        if self.shuffle_buffer > 1:
            rng = random.Random(f"{self.seed} {self.start} {place}")
            samples = wds.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=rng)(samples)
        waiting: dict[Size, list[Item]] = {}
        longest: dict[Size, int] = {}  # a batch is padded to its longest prompt
        for row, item in samples:
            size = size_of(row)
            group = waiting.setdefault(size, [])
            tokens = max(row["tokens"], longest.get(size, 0) if group else 0)
            # A sample that comes again belongs to the next epoch: no batch may hold it twice.
            if group and (any(item.id == other.id for other in group) or len(group) >= self.limit(tokens)):
                yield waiting.pop(size)
                group, tokens = waiting.setdefault(size, []), row["tokens"]
            group.append(item)
            longest[size] = tokens
            if len(group) >= self.limit(tokens):
                yield waiting.pop(size)

    def order(self, epoch: int) -> list[Shard]:
        """All shards, in the order of this epoch."""
        return random.Random(f"{self.seed} {self.start} {epoch}").sample(self.shards, len(self.shards))

    def _samples(self, place: int, places: int, stopped: threading.Event) -> Iterator[tuple[Row, Item]]:
        for epoch in itertools.count():
            for shard in self.order(epoch)[(place + epoch) % places :: places]:
                for sample in read_items(shard, self.empty_prompt, stopped):
                    if not _needed(stopped):
                        return
                    yield sample


def read_items(shard: Shard, empty_prompt: bool, stopped: threading.Event | None = None) -> Iterator[tuple[Row, Item]]:
    """The samples of a tar in order, each with its row of the index."""
    prompts: dict[str, dict[str, Tensor]] = {}
    for row, data in read_groups(shard, stopped):
        tensors = safetensors.torch.load(data)
        if "key" not in row:
            if empty_prompt or not row["id"].startswith("empty_prompt-"):
                prompts[row["id"]] = tensors
            continue
        name = row["empty_prompt"]
        empty = {k.removeprefix("empty_"): x for k, x in prompts[name].items()} if empty_prompt else {}
        yield row, Item(row["id"], row["key"], tensors, [prompts[id] for id in row["prompts"]], empty, name)


def _needed(stopped: threading.Event) -> bool:
    """Whether batches are still needed: a loop that ended by an error may not have set `stopped` when Python exits."""
    return not stopped.is_set() and threading.main_thread().is_alive()


class StreamLoader:
    """The batches of a stream.

    Args:
        num_workers: threads that prefetch, one batch of each in turn; 0 reads on demand. (Not processes: obstore has
            read the manifest before, and a forked process would wait forever for its threads.)
    """

    def __init__(self, stream: ShardStream, num_workers: int) -> None:
        self.stream = stream
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[LatentBatch]:
        stopped = threading.Event()
        if self.num_workers == 0:
            yield from self.stream.batches(0, 1, stopped)
            return
        queues: list[Queue[LatentBatch | Exception]] = [Queue(maxsize=2) for _ in range(self.num_workers)]
        threads = [
            threading.Thread(target=self._read, args=(worker, queue, stopped), name=f"shards {worker}")
            for worker, queue in enumerate(queues)
        ]
        for thread in threads:
            thread.start()
        try:
            for queue in itertools.cycle(queues):
                batch = queue.get()
                if isinstance(batch, Exception):
                    raise batch
                yield batch
        finally:
            stopped.set()
            for thread in threads:
                thread.join()

    def _read(self, worker: int, queue: "Queue[LatentBatch | Exception]", stopped: threading.Event) -> None:
        try:
            for batch in self.stream.batches(worker, self.num_workers, stopped):
                if not _put(batch, queue, stopped):
                    return
        except Exception as error:  # raised by the main thread
            _put(error, queue, stopped)


def _put(result: LatentBatch | Exception, queue: "Queue[LatentBatch | Exception]", stopped: threading.Event) -> bool:
    """Wait for a free slot in the queue; False if batches are no longer needed."""
    while _needed(stopped):
        with contextlib.suppress(Full):
            queue.put(result, timeout=0.5)
            return True
    return False
