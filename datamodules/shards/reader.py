"""Batches read directly from the tars of local shards."""

import json
import os
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, reduce
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.files import reading
from datamodules.sampler import drawn_caption, drawn_preserved
from datamodules.shards.index import ShardIndex

# By safetensors' names: those that a cache may hold.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}
REMEDY = "delete it and start again, and its samples are encoded again; if it is of data.shards, copy it again"
# One batch of a sampler: for each sample its index and the number of the draw.
BatchEntry = list[tuple[int, int]]
# Bytes to read for the header of a safetensors file: enough for a handful of tensors.
HEADER = 4096


class OpenRow(NamedTuple):
    """A safetensors file in a tar, from which bytes are read straight into a batch.

    Attributes:
        tar: the open tar.
        start: the row's offset in it.
    """

    tar: FileIO
    start: int

    def read(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes."""
        return os.pread(self.tar.fileno(), size, self.start + offset)

    def read_into(self, buffers: Sequence[Any], offset: int) -> int:
        """Fill the buffers one after the other; return the number of bytes."""
        return os.preadv(self.tar.fileno(), buffers, self.start + offset)


class Tars:
    """The tars of a folder, whose rows any thread may open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # A file that is evicted is closed once no thread reads from it.
        self._open = lru_cache(maxsize=128)(lambda name: FileIO(folder / name))

    def name(self, index: ShardIndex, row: int) -> str:
        """Return the path of the tar that holds a row, for messages."""
        return str(self.folder / index.shards[index.spans[3 * row]])

    def open(self, index: ShardIndex, row: int) -> OpenRow:
        """Open the row with this index."""
        shard, offset = index.spans[3 * row : 3 * row + 2]
        return OpenRow(self._open(index.shards[shard]), offset)


class LatentReader:
    """Batches by random access into the tars; the bytes are read from the file straight into the batch.

    Args:
        tars: opens the rows of the index.
        numbers: the samples' numbers in the index.
        keys: the samples' names.
        empty_prompt: whether batches include the empty prompt's conditioning.
        captions: of the samples, where they are known.
        weights: of the samples in the loss; none where all are 1.
        seed: draws one of a sample's captions, and of its preserved prompts; None for the first and for none.
        preserved: by the samples' numbers the rows of the prompts of which a batch has one beside each sample's own.
    """

    def __init__(
        self,
        tars: Tars,
        index: ShardIndex,
        numbers: Sequence[int],
        keys: Sequence[str],
        empty_prompt: bool,
        captions: Sequence[Sequence[str]] = (),
        weights: Sequence[float] = (),
        seed: int | None = None,
        preserved: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.tars = tars
        self.index = index
        self.numbers = array("q", numbers)
        self.keys = keys
        self.captions = captions
        self.weights = weights
        self.seed = seed
        self.preserved = preserved
        self.empty_prompt = empty_prompt
        self._intact = bytearray(len(index.checksums))  # of each row, whether it was compared with its checksum
        self.shapes = lru_cache(maxsize=1024)(self._shapes)
        self._read_empty = lru_cache(maxsize=8)(self._read)

    def __call__(self, items: BatchEntry) -> LatentBatch:
        """The batch of these samples, which must be of one size."""
        numbers = [self.numbers[index] for index, _ in items]
        own = tuple(self.index.samples[4 * number] for number in numbers)
        empty = tuple(self.index.empty_prompt_of(number) for number in numbers)
        rows = [self.index.prompts_of(number) for number in numbers]
        drawn = [drawn_caption(self.seed, draw, len(mine)) for (_, draw), mine in zip(items, rows, strict=True)]
        prompts = tuple(mine[caption] for mine, caption in zip(rows, drawn, strict=True))
        tensors = self._read(own)
        empty_prompt = {}
        if self.empty_prompt:
            shared = empty[:1] if len(set(empty)) == 1 else empty
            # Only one that all samples share is worth keeping in memory.
            read = self._read_empty if len(shared) == 1 else self._read
            empty_prompt = read(shared)
        keys, draws = [self.keys[index] for index, _ in items], [draw for _, draw in items]
        batch = latent_batch(keys, draws, tensors, self._read(prompts), empty_prompt)
        if self.captions:
            batch.prompts = [self.captions[index][caption] for (index, _), caption in zip(items, drawn, strict=True)]
        if self.preserved and self.seed is not None:
            batch.preserve_prompt = self._read(tuple(map(self._drawn_preserved, numbers, draws)))
        if self.weights:
            batch.weights = torch.tensor([self.weights[index] for index, _ in items])
        return batch

    def _drawn_preserved(self, number: int, draw: int) -> int:
        assert self.seed is not None
        rows = self.preserved[number]
        return rows[drawn_preserved(self.seed, draw, len(rows))]

    def others_fit(self) -> bool:
        """Whether what a batch has beside its samples' own prompts has the shapes of these, which have one."""
        rows = {row for number in self.numbers for row in self.preserved.get(number, ())}
        if self.empty_prompt:
            rows |= set(map(self.index.empty_prompt_of, self.numbers))
        own = self.shapes(self.index.prompts_of(self.numbers[0])[0])
        return all(self.shapes(row) == own for row in rows)

    def most_tokens(self, number: int, text: str) -> int:
        """A sample's tokens with the longest of its prompts, the preserved ones among them.

        Args:
            text: the prompt tensor that has as many rows as there are text tokens.
        """
        own = max(self.shapes(row)[text][0] for row in self.index.prompts_of(number))
        preserved = max((self.shapes(row)[text][0] for row in self.preserved[number]), default=0)
        return self.index.tokens[number] + max(0, preserved - own)

    def _shapes(self, row: int) -> dict[str, list[int]]:
        """Of the tensors of a row, by name."""
        with reading(self.tars.name(self.index, row), REMEDY):
            layout, _ = _header(self.tars.open(self.index, row), self.index.spans[3 * row + 2])
        return {name: shape for name, (_, shape) in layout.items()}

    def _read(self, rows: tuple[int, ...]) -> dict[str, Tensor]:
        """The tensors of some rows by name, each (B, longest, ...), padded with zeros."""
        opened, found = [], []
        for row in rows:
            with reading(self.tars.name(self.index, row), REMEDY):
                opened.append(self.tars.open(self.index, row))
                found.append(_header(opened[-1], self.index.spans[3 * row + 2]))
        layouts, starts = zip(*found, strict=True)
        kinds = [{name: (dtype, shape[1:]) for name, (dtype, shape) in layout.items()} for layout in layouts]
        if any(kind != kinds[0] for kind in kinds):
            name = self.tars.name(self.index, rows[0])
            raise ValueError(f"{name}: samples of one batch differ in their tensors")
        batch = {}
        for name, (dtype, shape) in layouts[0].items():
            lengths = [layout[name][1][0] for layout in layouts]
            make = torch.empty if len(set(lengths)) == 1 else torch.zeros
            batch[name] = make(len(rows), max(lengths), *shape[1:], dtype=dtype)
        for place, (row, file, layout, start) in enumerate(zip(rows, opened, layouts, starts, strict=True)):
            parts = [batch[name][place, : shape[0]] for name, (_, shape) in layout.items()]
            buffers: list[Any] = [part.reshape(-1).view(torch.uint8).numpy() for part in parts]
            with reading(self.tars.name(self.index, row), REMEDY):
                if file.read_into(buffers, start) != sum(buffer.nbytes for buffer in buffers):
                    raise EOFError("it ends too early")
                if not self._intact[row]:
                    checksum = reduce(
                        lambda sum, buffer: zlib.crc32(buffer, sum), buffers, zlib.crc32(file.read(start, 0))
                    )
                    if checksum != self.index.checksums[row]:
                        raise ValueError("its bytes are not those that were written")
                    self._intact[row] = True
        return batch


def _header(file: OpenRow, length: int) -> tuple[dict[str, tuple[torch.dtype, list[int]]], int]:
    """The dtype and shape of each tensor of a safetensors file, in order, and where their bytes begin.

    Raises:
        ValueError, KeyError, TypeError: it is no such file of `length` bytes.
    """
    first = file.read(HEADER, 0)
    text_length = int.from_bytes(first[:8], "little")
    if text_length > length - 8:
        raise ValueError("no tensors where the index says")
    within = text_length <= HEADER - 8
    text = first[8 : 8 + text_length] if within else file.read(text_length, 8)
    if len(text) < max(text_length, 2):
        raise EOFError("it ends too early")
    facts = sorted(json.loads(text).items(), key=lambda item: item[1]["data_offsets"])
    start = 8 + text_length
    if not facts or facts[-1][1]["data_offsets"][1] != length - start:
        raise ValueError(f"no tensors of {length} bytes where the index says")
    # The empty prompt's tensors have names of their own in a shard.
    return {name.removeprefix("empty_"): (DTYPES[one["dtype"]], one["shape"]) for name, one in facts}, start


def latent_batch(
    keys: list[str],
    draws: list[int],
    tensors: dict[str, Tensor],
    prompt: dict[str, Tensor],
    empty_prompt: dict[str, Tensor],
) -> LatentBatch:
    """A batch of the tensors of some samples, each (B, ...)."""
    return LatentBatch(
        keys=keys,
        draws=draws,
        target_mean=tensors["target_mean"],
        target_std=tensors.get("target_std"),
        controls=[tensors[f"control_{number}"] for number in range(len(tensors)) if f"control_{number}" in tensors],
        prompt=prompt,
        empty_prompt=empty_prompt,
        mask=tensors["mask"].float() / 255 if "mask" in tensors else None,
        rejected_mean=tensors.get("rejected_mean"),
        rejected_std=tensors.get("rejected_std"),
    )


class ThreadedLoader:
    """Batches in the sampler's order, prefetched by threads.

    Reading is mostly copying, which threads do in parallel; processes would spend more time passing tensors on.

    Args:
        load: reads the batch of an entry of the sampler.
        num_workers: threads; 0 reads each batch on demand.
    """

    def __init__(
        self, load: Callable[[BatchEntry], LatentBatch], sampler: Iterable[BatchEntry], num_workers: int
    ) -> None:
        self.load = load
        self.sampler = sampler
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[LatentBatch]:
        if self.num_workers == 0:
            yield from map(self.load, self.sampler)
            return
        entries = iter(self.sampler)
        ahead: deque[Future[LatentBatch]] = deque()
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="shards") as pool:
            try:
                for entry in entries:
                    ahead.append(pool.submit(self.load, entry))
                    if len(ahead) > 2 * self.num_workers:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()
