"""Shards that are somewhere else: object storage, HTTP, pipes."""

import itertools
import json
import logging
import random
import re
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import aiohttp
import fsspec
import lightning.pytorch as L
import safetensors.torch
import webdataset as wds
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from webdataset.gopen import Pipe, gopen
from webdataset.shardlists import expand_urls
from webdataset.tariterators import group_by_keys, tar_file_iterator

from datamodules.batch import LatentBatch
from datamodules.errors import UserError
from datamodules.latents import latent_batch, size_of
from datamodules.pairs import Example, Size, leave_signals_to_the_trainer, refuse_epochs
from datamodules.shards import MANIFEST, Row, check_fit, fingerprint_parts

log = logging.getLogger("retouch")

ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
TAR = re.compile(r"[^/\s\"']+\.tar")


class Shard(NamedTuple):
    """Where a tar is, and what it holds."""

    url: str
    samples: int
    prompts: int


def find_shards(pattern: str) -> tuple[list[Shard], dict[str, Any]]:
    """The shards that a URL stands for, and the manifest beside them.

    Args:
        pattern: the URL of a cache's folder, or of its tars with braces: `s3://bucket/latents-{00000..00099}.tar`;
            `pipe:` and a command that writes a tar.

    Raises:
        UserError: there is no manifest, or it does not know one of the tars.
    """
    urls = expand_urls(pattern)
    names = [TAR.findall(url) for url in urls]
    is_folder = not any(names) and not pattern.startswith("pipe:")
    if is_folder:
        manifest_url = f"{pattern.rstrip('/')}/{MANIFEST}"
    elif all(names):
        first, _, last = urls[0].rpartition(names[0][-1])
        manifest_url = first + MANIFEST + last
    else:
        raise UserError(f"data.shards={pattern}: names no .tar")
    try:
        manifest = json.loads(_fetch(manifest_url))
        known = {name: Shard(name, facts["samples"], facts["prompts"]) for name, facts in manifest["shards"].items()}
        if not {"parts", "sizes", "samples", "tokens"} <= manifest.keys():
            raise KeyError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data.shards: {manifest_url} is no manifest of a cache") from error
    if is_folder:
        urls = [f"{pattern.rstrip('/')}/{name}" for name in known]
        names = [[name] for name in known]
    for url, found in zip(urls, names, strict=True):
        if found[-1] not in known:
            raise UserError(f"data.shards: {manifest_url} knows no {found[-1]} ({url})")
    shards = [known[found[-1]]._replace(url=url) for url, found in zip(urls, names, strict=True)]
    if not any(shard.samples for shard in shards):
        raise UserError(f"data.shards={pattern}: no samples")
    return shards, manifest


def _open(url: str) -> IO[bytes]:
    if url.startswith("pipe:"):
        return gopen(url, "rb")
    # 0: one request for the whole file, where there is a choice.
    # No limit for the whole: training reads as slowly as it trains.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
    options = {"block_size": 0, "client_kwargs": {"timeout": timeout}} if url.startswith("http") else {}
    try:
        return fsspec.open(url, "rb", **options).open()
    except (ImportError, ValueError) as error:  # no such protocol, or its library is missing
        raise UserError(f"data.shards: cannot open {url}: {error}") from error


def _errors() -> tuple[type[Exception], ...]:
    """What an interrupted transfer may raise."""
    errors: list[type[Exception]] = [OSError, EOFError, tarfile.TarError, aiohttp.ClientError, _DamagedError]
    try:
        from botocore.exceptions import BotoCoreError

        errors.append(BotoCoreError)
    except ImportError:
        pass
    return tuple(errors)


class _DamagedError(Exception):
    """What has arrived is not what was written."""


def _after(error: Exception, url: str, attempt: int) -> None:
    """Wait before the next attempt, or say why there is none."""
    while isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec says so of whatever went wrong
    what = (str(error) or type(error).__name__).splitlines()[0]
    status = error.status if isinstance(error, aiohttp.ClientResponseError) else None
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        raise UserError(f"data.shards: {url} is not there") from error
    if isinstance(error, PermissionError) or status in (401, 403):
        raise UserError(f"data.shards: {url} may not be read ({what})") from error
    if attempt == ATTEMPTS:
        raise UserError(f"data.shards: {url} cannot be read: {what} ({attempt} attempts)") from error
    pause = PAUSE * 2 ** (attempt - 1)
    log.warning(f"note: {url}: {what}; attempt {attempt + 1} of {ATTEMPTS} in {pause:g} s")
    time.sleep(pause)


def _fetch(url: str) -> bytes:
    for attempt in itertools.count(1):
        try:
            with _open(url) as stream:
                return stream.read()
        except _errors() as error:
            _after(error, url, attempt)
    raise AssertionError


def read_groups(shard: Shard) -> Iterator[tuple[Row, bytes]]:
    """The samples and prompts of a tar in order: the JSON and the safetensors of each.

    A transfer that breaks off is taken up again; no group is left out in silence.
    """
    done = 0
    attempt = 1
    while True:
        before = done
        try:
            with _open(shard.url) as stream:
                members = ({**member, "__url__": shard.url} for member in tar_file_iterator(stream))
                for number, group in enumerate(group_by_keys(members)):
                    if number >= done:
                        whole = _whole(group)
                        done += 1
                        try:
                            yield whole
                        except GeneratorExit:
                            if isinstance(stream, Pipe):  # whose command will complain that nobody listens
                                stream.ignore_errors = True
                            raise
            if done == shard.samples + shard.prompts:
                return
            raise _DamagedError(f"ended after {done} of {shard.samples + shard.prompts} entries")
        except _errors() as error:
            attempt = attempt if done == before else 1
            _after(error, shard.url, attempt)
            attempt += 1


def _whole(group: Mapping[str, Any]) -> tuple[Row, bytes]:
    if "json" not in group or "safetensors" not in group:
        raise _DamagedError(f"{group['__key__']} was cut short")
    try:
        row, data = json.loads(group["json"]), group["safetensors"]
        if zlib.crc32(data) == row["crc32"]:
            return row, data
    except (ValueError, KeyError):
        pass
    raise _DamagedError(f"{group['__key__']} is damaged")


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
    tensors, prompt, empty_prompt = map(default_collate, ([i.tensors for i in items], [i.prompt for i in items], empty))
    return latent_batch([item.key for item in items], [], tensors, prompt, empty_prompt)


class StreamedDataModule(L.LightningDataModule):
    """All samples of shards that are somewhere else.

    Args:
        shards: see `find_shards`.
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
        check_fit(self.manifest["parts"], fingerprint_parts(module, self.memo), f"data.shards={self.pattern}")

    def train_dataloader(self) -> "StreamLoader":
        trainer = self.trainer
        assert trainer is not None
        refuse_epochs(trainer, self.batches_per_epoch(), self._samples())
        stream = ShardStream(
            self.shards,
            partial(_limit, self.batch_size, self.max_tokens_per_batch),
            self.shuffle_buffer,
            self.seed,
            trainer.global_rank,
            trainer.world_size,
            start=trainer.global_step * trainer.accumulate_grad_batches,
            empty_prompt=self.caption_dropout_rate > 0,
        )
        return StreamLoader(stream, self.num_workers, self.max_tokens_per_batch or self.batch_size)

    def examples(self, count: int) -> list[Example]:
        """The samples that the first shards begin with."""
        items = itertools.chain.from_iterable(read_items(shard, empty_prompt=False) for shard in self.shards)
        return [Example([], collate([item])) for _, item in itertools.islice(items, count)]

    def describe(self) -> str:
        return f"{self._samples():,} samples in {len(self.shards)} shards, streamed from {self.pattern}"

    def _samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    def size_counts(self) -> Counter[tuple[int, int]]:
        """How many targets there are of each (width, height), in all that the manifest knows."""
        return Counter({size: n for name, n in self.manifest["sizes"].items() for size in [_size(name)]})

    def batches_per_epoch(self) -> float:
        """Of this process, about."""
        assert self.trainer is not None
        tokens = self.manifest["tokens"] / self.manifest["samples"]
        budget = self.max_tokens_per_batch
        limit = self.batch_size if budget is None else max(1.0, budget / tokens)
        return self._samples() / limit / self.trainer.world_size


def _limit(batch_size: int, budget: int | None, row: Row) -> int:
    return batch_size if budget is None else max(1, budget // row["tokens"])


def _size(name: str) -> tuple[int, int]:
    width, height = map(int, name.split("x"))
    return width, height


class ShardStream(IterableDataset[LatentBatch]):
    """Batches of one size, without end, by WebDataset.

    In each epoch the shards come in another order and are dealt out to all workers of all processes, in turn; so
    any number of shards serves any number of workers. A buffer shuffles what a worker reads.

    Args:
        limit: a sample's row -> how many like it make a batch.
        shuffle_buffer: samples that each worker holds to shuffle them.
        rank, world_size: this process among all.
        start: steps made before; a run that goes on sees the shards in an order of its own.
        empty_prompt: whether batches carry the empty prompt's conditioning.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        limit: Callable[[Row], int],
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

    def __iter__(self) -> Iterator[LatentBatch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        place, places = self.rank * workers + worker, self.world_size * workers
        samples: Any = self._samples(place, places)
        if self.shuffle_buffer > 1:
            rng = random.Random(f"{self.seed} {self.start} {place}")
            samples = wds.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=rng)(samples)
        waiting: dict[Size, list[Item]] = {}
        for row, item in samples:
            size = size_of(row)
            if any(item.key == other.key for other in waiting.get(size, ())):
                yield collate(waiting.pop(size))  # of a rare size all have come, and a new epoch begins
            waiting.setdefault(size, []).append(item)
            if len(waiting[size]) >= self.limit(row):
                yield collate(waiting.pop(size))

    def order(self, epoch: int) -> list[Shard]:
        """All shards, as this epoch deals them out."""
        return random.Random(f"{self.seed} {self.start} {epoch}").sample(self.shards, len(self.shards))

    def _samples(self, place: int, places: int) -> Iterator[tuple[Row, Item]]:
        for epoch in itertools.count():
            for shard in self.order(epoch)[(place + epoch) % places :: places]:
                yield from read_items(shard, self.empty_prompt)


def read_items(shard: Shard, empty_prompt: bool) -> Iterator[tuple[Row, Item]]:
    """The samples of a tar in order, each with its prompt."""
    prompts: dict[str, dict[str, Tensor]] = {}
    for row, data in read_groups(shard):
        tensors = safetensors.torch.load(data)
        if "key" not in row:
            prompts[row["id"]] = tensors
            continue
        name = row["empty_prompt"]
        empty = {k.removeprefix("empty_"): x for k, x in prompts[name].items()} if empty_prompt else {}
        yield row, Item(row["key"], tensors, prompts[row["prompt"]], empty, name)


class StreamLoader:
    """A loader of a stream that numbers the draws: all randomness of a sample is a function of the seed and these.

    Args:
        stride: no batch holds more samples.
    """

    def __init__(self, stream: ShardStream, num_workers: int, stride: int) -> None:
        self.stream = stream
        self.stride = stride
        self.loader = DataLoader(
            dataset=stream, batch_size=None, num_workers=num_workers, worker_init_fn=leave_signals_to_the_trainer
        )

    def __iter__(self) -> Iterator[LatentBatch]:
        for number, batch in enumerate(self.loader, self.stream.start):
            first = (number * self.stream.world_size + self.stream.rank) * self.stride
            batch.draws = list(range(first, first + len(batch.keys)))
            yield batch
