"""Remote shards: found by their manifest, streamed despite network failures, and collected into batches without end."""

import itertools
import random
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import safetensors.torch
import webdataset as wds
from torch import Tensor

from datamodules.batch import LatentBatch, stack_padded
from datamodules.errors import UserError, without_credentials
from datamodules.images.framing import Size
from datamodules.prefetch import Jobs
from datamodules.sampler import drawn_caption
from datamodules.shards.cache import MANIFEST, parse_manifest
from datamodules.shards.reader import latent_batch, without_prefix
from datamodules.shards.tar import DamagedError, Row, read_groups, size_of
from datamodules.shards.transfer import BROKEN, Attempts, fetch, open_url


class RemoteShard(NamedTuple):
    """A tar behind a URL, with the number of its samples and prompts."""

    url: str
    samples: int
    prompts: int


def find_shards(url: str) -> tuple[list[RemoteShard], dict[str, Any]]:
    """Return the shards of the cache at a URL, and its manifest.

    Raises:
        UserError: there is no manifest, or it lists no samples.
    """
    path, mark, query = url.partition("?")  # the query may be a token
    inside = lambda name: f"{path.rstrip('/')}/{name}{mark}{query}"  # noqa: E731
    try:
        manifest = parse_manifest(fetch(inside(MANIFEST)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data.shards: {without_credentials(inside(MANIFEST))} is no manifest of a cache") from error
    found = [RemoteShard(inside(name), one["samples"], one["prompts"]) for name, one in manifest["shards"].items()]
    shards = [shard for shard in found if shard.samples]  # a build may have added only prompts
    if not shards:
        raise UserError(f"data.shards={without_credentials(url)}: it contains no samples")
    return shards, manifest


def read_rows(shard: RemoteShard, stopped: threading.Event | None = None) -> Iterator[tuple[Row, bytes]]:
    """Yield the row and the safetensors of each sample and prompt of a tar, in order.

    After a failure the tar is read again from its last complete group; nothing is skipped silently.

    Args:
        stopped: no further attempt is made once it is set.

    Raises:
        UserError: the tar cannot be read, or changed while it was read.
    """
    attempts = Attempts(shard.url, stopped=stopped or threading.Event())
    tag, start, count = None, 0, 0
    while count < shard.samples + shard.prompts:
        try:
            stream, opened_at = open_url(shard.url, start), start
            if tag not in (None, stream.tag):
                where = without_credentials(shard.url)
                raise UserError(f"data.shards: {where} changed while it was read. Start again.")
            tag = stream.tag
            with tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
                for row, data, _, end in read_groups(tar):
                    count, start = count + 1, opened_at + end
                    attempts.count = 0
                    yield row, data
            if count < shard.samples + shard.prompts:
                raise DamagedError(f"it ended after {count} of {shard.samples + shard.prompts} entries")
        except BROKEN as error:
            attempts.after(error)


@dataclass
class Item:
    """A sample from a stream.

    Attributes:
        id: of its row; a sample with several views has several.
        prompts: the conditioning of each of its captions.
        empty_id: the id of its empty prompt's conditioning, which samples may share.
    """

    id: str
    key: str
    tensors: dict[str, Tensor]
    prompts: list[dict[str, Tensor]]
    empty_prompt: dict[str, Tensor]
    empty_id: str


def read_items(
    shard: RemoteShard, empty_prompt: bool, stopped: threading.Event | None = None
) -> Iterator[tuple[Row, Item]]:
    """Yield the samples of a tar in order, each with its row of the index."""
    prompts: dict[str, dict[str, Tensor]] = {}
    for row, data in read_rows(shard, stopped):
        if "key" not in row:
            if empty_prompt or not row["id"].startswith("empty_prompt-"):
                prompts[row["id"]] = without_prefix(safetensors.torch.load(data))
            continue
        name = row["empty_prompt"]
        empty = prompts[name] if empty_prompt else {}
        yield (
            row,
            Item(
                row["id"], row["key"], safetensors.torch.load(data), [prompts[p] for p in row["prompts"]], empty, name
            ),
        )


def collate(items: list[Item], draws: list[int], seed: int | None, preserve_empty: bool = False) -> LatentBatch:
    """Return the batch of samples of one size.

    Args:
        seed: draws their captions, with the draws; None for the first.
        preserve_empty: whether the empty prompt is the preserved prompt of each sample.
    """
    drawn = zip(items, draws, strict=True)
    prompts = [item.prompts[drawn_caption(seed, draw, len(item.prompts))] for item, draw in drawn]
    empty = [item.empty_prompt for item in items]
    shared = empty[:1] if len({item.empty_id for item in items}) == 1 else empty
    batch = latent_batch([item.key for item in items], draws, [item.tensors for item in items], prompts, shared)
    if preserve_empty:
        batch.preserve_prompt = stack_padded(empty)
    return batch


@dataclass
class ShardStream:
    """Batches of one size, without end.

    In each epoch the shards are shuffled and dealt out to all workers of all processes in turn, so any number of
    shards suits any number of workers. The samples that a worker reads pass through a shuffle buffer.

    Attributes:
        limit: returns how many samples with this number of tokens make a batch.
        shuffle_buffer: samples in the buffer of each worker.
        rank, world_size: of this process.
        start: batches of this process before the run was resumed; part of the seed of the order.
        empty_prompt: whether batches include the empty prompt's conditioning.
        stride: the most samples of a batch; each batch reserves as many draws.
        preserve_empty: see `collate`.
    """

    shards: Sequence[RemoteShard]
    limit: Callable[[int], int]
    shuffle_buffer: int
    seed: int
    rank: int
    world_size: int
    start: int
    empty_prompt: bool
    stride: int
    preserve_empty: bool = False

    def jobs(self, workers: int) -> Jobs:
        """Yield the jobs of a `ThreadedLoader`, each of which reads a batch; workers take turns."""
        stopped = threading.Event()
        streams = [self.batches(worker, workers, stopped) for worker in range(workers)]
        try:
            for stream in itertools.cycle(streams):
                yield stream.__next__
        finally:
            stopped.set()

    def batches(self, worker: int, workers: int, stopped: threading.Event) -> Iterator[LatentBatch]:
        """Yield the batches of one worker, until `stopped` is set.

        All randomness of a sample is a function of the seed and the index of its draw.
        """
        numbers = itertools.count(self.start + worker, workers)
        for items, number in zip(self._groups(worker, workers, stopped), numbers, strict=False):
            first = (number * self.world_size + self.rank) * self.stride
            yield collate(items, list(range(first, first + len(items))), self.seed, self.preserve_empty)

    def _groups(self, worker: int, workers: int, stopped: threading.Event) -> Iterator[list[Item]]:
        """Yield the samples of each batch of one worker."""
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
            # A sample that is drawn again belongs to the next epoch: no batch may contain it twice.
            if group and (any(item.id == other.id for other in group) or len(group) >= self.limit(tokens)):
                yield waiting.pop(size)
                group, tokens = waiting.setdefault(size, []), row["tokens"]
            group.append(item)
            longest[size] = tokens
            if len(group) >= self.limit(tokens):
                yield waiting.pop(size)

    def order(self, epoch: int) -> list[RemoteShard]:
        """Return all shards in the order of this epoch."""
        return random.Random(f"{self.seed} {self.start} {epoch}").sample(self.shards, len(self.shards))

    def _samples(self, place: int, places: int, stopped: threading.Event) -> Iterator[tuple[Row, Item]]:
        for epoch in itertools.count():
            for shard in self.order(epoch)[(place + epoch) % places :: places]:
                for sample in read_items(shard, self.empty_prompt or self.preserve_empty, stopped):
                    if stopped.is_set():
                        return
                    yield sample
