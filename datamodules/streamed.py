"""Shards that are somewhere else, as a stream of batches."""

import contextlib
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any

import lightning.pytorch as L
import safetensors.torch
import webdataset as wds
from torch import Tensor

from datamodules.batch import LatentBatch, stack_padded
from datamodules.pairs import Example, Size, refuse_epochs
from datamodules.prefetch import Feed
from datamodules.sampler import samples_per_batch
from datamodules.shards.cache import check_fit, fingerprint_parts
from datamodules.shards.failures import shown
from datamodules.shards.reader import latent_batch, size_of
from datamodules.shards.remote import Shard, find_shards, read_groups
from datamodules.shards.tar import Row


@dataclass
class Item:
    """A sample as it arrives; `empty_id` is the same for samples whose empty prompts are."""

    key: str
    tensors: dict[str, Tensor]
    prompt: dict[str, Tensor]
    empty_prompt: dict[str, Tensor]
    empty_id: str


def collate(items: list[Item]) -> LatentBatch:
    """Samples of one size to one batch, its draws still to be numbered."""
    empty = [item.empty_prompt for item in items]
    if len({item.empty_id for item in items}) == 1:
        empty = empty[:1]
    tensors, prompt, empty_prompt = map(stack_padded, ([i.tensors for i in items], [i.prompt for i in items], empty))
    return latent_batch([item.key for item in items], [], tensors, prompt, empty_prompt)


class StreamedDataModule(L.LightningDataModule):
    """All samples of shards that are somewhere else.

    Args:
        shards: see `remote.find_shards`.
        batch_size, max_tokens_per_batch, num_workers, caption_dropout_rate, seed: as for `CachedDataModule`.
        shuffle_buffer: samples that each data worker holds to shuffle them.
        memo: a file that remembers the checksums of a local model's files.
    """

    needs_encoders = False

    def __init__(
        self,
        shards: str,
        batch_size: int,
        max_tokens_per_batch: int | None,
        num_workers: int,
        caption_dropout_rate: float,
        seed: int,
        shuffle_buffer: int,
        memo: Path,
    ) -> None:
        super().__init__()
        self.knows_prompts = False
        self.validation = None  # a stream has no part that could be held out
        self.pattern = shards
        self.batch_size = batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.num_workers = num_workers
        self.caption_dropout_rate = caption_dropout_rate
        self.seed = seed
        self.shuffle_buffer = shuffle_buffer
        self.memo = memo
        self.notes: list[str] = []
        self.shards: list[Shard] = []
        self.manifest: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        self.shards, self.manifest = find_shards(self.pattern)
        check_fit(self.manifest["parts"], fingerprint_parts(module, self.memo), f"data.shards={shown(self.pattern)}")

    def train_dataloader(self) -> Feed:
        trainer = self.trainer
        assert trainer is not None
        refuse_epochs(trainer, self.batches_per_epoch(), self._samples())
        stream = ShardStream(
            self.shards,
            partial(samples_per_batch, self.batch_size, self.max_tokens_per_batch),
            self.shuffle_buffer,
            self.seed,
            trainer.global_rank,
            trainer.world_size,
            start=trainer.global_step * trainer.accumulate_grad_batches,
            empty_prompt=self.caption_dropout_rate > 0,
        )
        batches = StreamLoader(stream, self.num_workers, self.max_tokens_per_batch or self.batch_size)
        return Feed(batches, trainer.strategy.root_device)

    def examples(self, count: int, empty_prompt: bool) -> list[Example]:
        """The samples that the first shards begin with."""
        items = itertools.chain.from_iterable(read_items(shard, empty_prompt) for shard in self.shards)
        return [Example([], collate([item])) for _, item in itertools.islice(items, count)]

    def describe(self) -> str:
        return f"{self._samples():,} samples in {len(self.shards)} shards, streamed from {shown(self.pattern)}"

    def _samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def is_uniform(self, module: Any) -> bool:
        """Whether all batches are alike in their shapes: what is not known is taken not to be."""
        return False

    def size_counts(self) -> Counter[tuple[int, int]]:
        """How many targets there are of each (width, height), in all that the manifest knows."""
        return Counter({_size(name): n for name, n in self.manifest["sizes"].items()})

    def batches_per_epoch(self) -> float:
        """Of this process, about."""
        assert self.trainer is not None
        tokens = self.manifest["tokens"] / self.manifest["samples"]
        limit = samples_per_batch(self.batch_size, self.max_tokens_per_batch, tokens)
        return self._samples() / limit / self.trainer.world_size


def _size(name: str) -> tuple[int, int]:
    width, height = map(int, name.split("x"))
    return width, height


class ShardStream:
    """Batches of one size, without end, by WebDataset.

    In each epoch the shards come in another order and are dealt out to all workers of all processes, in turn; so
    any number of shards serves any number of workers. A buffer shuffles what a worker reads.

    Args:
        limit: a sample's tokens -> how many like it make a batch.
        shuffle_buffer: samples that each worker holds to shuffle them.
        rank, world_size: this process among all.
        start: steps made before; a run that goes on sees the shards in an order of its own.
        empty_prompt: whether batches carry the empty prompt's conditioning.
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
    ) -> None:
        self.shards = list(shards)
        self.limit = limit
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start = start
        self.empty_prompt = empty_prompt

    def batches(self, worker: int, workers: int, stopped: threading.Event) -> Iterator[LatentBatch]:
        """What one of the workers reads, until it is stopped."""
        place, places = self.rank * workers + worker, self.world_size * workers
        samples: Any = self._samples(place, places, stopped)
        if self.shuffle_buffer > 1:
            rng = random.Random(f"{self.seed} {self.start} {place}")
            samples = wds.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=rng)(samples)
        waiting: dict[Size, list[Item]] = {}
        longest: dict[Size, int] = {}  # a batch is padded to its longest prompt
        for row, item in samples:
            size = size_of(row)
            group = waiting.setdefault(size, [])
            tokens = max(row["tokens"], longest.get(size, 0) if group else 0)
            # Of a rare size all have come when one comes again: a new epoch begins.
            if group and (any(item.key == other.key for other in group) or len(group) >= self.limit(tokens)):
                yield collate(waiting.pop(size))
                group, tokens = waiting.setdefault(size, []), row["tokens"]
            group.append(item)
            longest[size] = tokens
            if len(group) >= self.limit(tokens):
                yield collate(waiting.pop(size))

    def order(self, epoch: int) -> list[Shard]:
        """All shards, as this epoch deals them out."""
        return random.Random(f"{self.seed} {self.start} {epoch}").sample(self.shards, len(self.shards))

    def _samples(self, place: int, places: int, stopped: threading.Event) -> Iterator[tuple[Row, Item]]:
        for epoch in itertools.count():
            for shard in self.order(epoch)[(place + epoch) % places :: places]:
                for sample in read_items(shard, self.empty_prompt, stopped):
                    if not _wanted(stopped):
                        return
                    yield sample


def read_items(shard: Shard, empty_prompt: bool, stopped: threading.Event | None = None) -> Iterator[tuple[Row, Item]]:
    """The samples of a tar in order, each with its prompt."""
    prompts: dict[str, dict[str, Tensor]] = {}
    for row, data in read_groups(shard, stopped):
        tensors = safetensors.torch.load(data)
        if "key" not in row:
            if empty_prompt or not row["id"].startswith("empty_prompt-"):
                prompts[row["id"]] = tensors
            continue
        name = row["empty_prompt"]
        empty = {k.removeprefix("empty_"): x for k, x in prompts[name].items()} if empty_prompt else {}
        yield row, Item(row["key"], tensors, prompts[row["prompt"]], empty, name)


def _wanted(stopped: threading.Event) -> bool:
    """Whether the loop still runs. One that ended by an error elsewhere may not have said so before Python ends."""
    return not stopped.is_set() and threading.main_thread().is_alive()


class StreamLoader:
    """A loader of a stream that numbers the draws: all randomness of a sample is a function of the seed and these.

    Args:
        num_workers: threads that read ahead, one batch of each in turn; 0 reads when asked. (A forked process would
            lack the threads of obstore, which has read the manifest before, and wait for them for ever.)
        stride: no batch holds more samples.
    """

    def __init__(self, stream: ShardStream, num_workers: int, stride: int) -> None:
        self.stream = stream
        self.num_workers = num_workers
        self.stride = stride

    def __iter__(self) -> Iterator[LatentBatch]:
        for number, batch in enumerate(self._batches(), self.stream.start):
            first = (number * self.stream.world_size + self.stream.rank) * self.stride
            batch.draws = list(range(first, first + len(batch.keys)))
            yield batch

    def _batches(self) -> Iterator[LatentBatch]:
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
        except Exception as error:  # for the loop to raise
            _put(error, queue, stopped)


def _put(result: LatentBatch | Exception, queue: "Queue[LatentBatch | Exception]", stopped: threading.Event) -> bool:
    """Wait for a place in the queue; false if none is wanted any more."""
    while _wanted(stopped):
        with contextlib.suppress(Full):
            queue.put(result, timeout=0.5)
            return True
    return False
