"""Samples in local shards: an index in memory, random access into the tars, and batches of them."""

import json
import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from datamodules.batch import LatentBatch
from datamodules.errors import UserError
from datamodules.pairs import Size
from datamodules.shards import Row

# As safetensors names them; what a cache holds.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}


class ShardIndex:
    """Where each sample is, in arrays of a few bytes a sample that data workers share.

    Args:
        rows: of an index; the prompts of a shard stand before the samples that use them.

    Attributes:
        shards: their file names.
        spans: for each row three numbers: shard, offset, bytes.
        samples: for each sample three rows: its own, its prompt's, the empty prompt's.
        ids: the samples' numbers by their names in the cache.
        keys, sizes, tokens: of each sample.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.spans, self.samples, self.tokens = array("q"), array("q"), array("q")
        self.ids: dict[str, int] = {}
        self.keys: list[str] = []
        self.sizes: list[Size] = []
        self.resized: set[int] = set()
        shards: dict[str, int] = {}
        sizes: dict[Size, Size] = {}
        prompts: dict[str, int] = {}
        for number, row in enumerate(rows):
            shard = shards.setdefault(row["shard"], len(shards))
            self.spans.extend((shard, row["offset"], row["bytes"]))
            if "key" not in row:
                prompts.setdefault(row["id"], number)
                continue
            self.ids[row["id"]] = len(self.keys)
            if row["resized"]:
                self.resized.add(len(self.keys))
            self.keys.append(row["key"])
            self.samples.extend((number, prompts[row["prompt"]], prompts[row["empty_prompt"]]))
            self.tokens.append(row["tokens"])
            size = size_of(row)
            self.sizes.append(sizes.setdefault(size, size))
        self.shards = list(shards)


def size_of(row: Row) -> Size:
    """What the samples of a batch have in common."""
    return tuple((width, height) for width, height in row["sizes"]), row["mask"]


class Span(NamedTuple):
    """Bytes of a memory-mapped shard."""

    memory: mmap.mmap
    offset: int
    bytes: int

    def forget(self) -> None:
        """Give its pages back: else the process grows by all that it has read."""
        start = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = self.offset + self.bytes - start
        if length > 0 and hasattr(self.memory, "madvise"):
            self.memory.madvise(mmap.MADV_DONTNEED, start, length)


def views(span: Span) -> dict[str, Tensor]:
    """The tensors of a safetensors file inside a map, not copied."""
    memory, start, _ = span
    begin = start + 8 + int.from_bytes(memory[start : start + 8], "little")
    tensors = {}
    for name, facts in json.loads(memory[start + 8 : begin]).items():
        first, last = facts["data_offsets"]
        dtype = DTYPES[facts["dtype"]]
        flat = torch.frombuffer(memory, dtype=dtype, count=(last - first) // dtype.itemsize, offset=begin + first)
        tensors[name] = flat.view(facts["shape"])
    return tensors


@dataclass
class Item:
    """A sample as views into its shards, until `collate` copies them: `spans` are the bytes behind the views.

    `empty_id` is the same for samples whose empty prompts are the same.
    """

    key: str
    draw: int
    tensors: dict[str, Tensor]
    prompt: dict[str, Tensor]
    empty_prompt: dict[str, Tensor]
    empty_id: object
    spans: list[Span] = field(default_factory=list)


class LatentDataset(Dataset[Item]):
    """Random access into tars, by memory maps.

    Args:
        folder: of the tars.
        numbers: the samples' numbers in the index.
        keys: the samples' names.
        empty_prompt: whether batches carry the empty prompt's conditioning.
    """

    def __init__(
        self, folder: Path, index: ShardIndex, numbers: Sequence[int], keys: Sequence[str], empty_prompt: bool
    ) -> None:
        self.paths = [folder / name for name in index.shards]
        self.spans = index.spans
        self.samples = index.samples
        self.numbers = array("q", numbers)
        self.keys = keys
        self.empty_prompt = empty_prompt
        self._maps: dict[int, mmap.mmap] = {}
        self._empty: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: tuple[int, int]) -> Item:
        index, draw = item
        own, prompt, empty = self.samples[3 * self.numbers[index] : 3 * self.numbers[index] + 3]
        spans = [self._span(own), self._span(prompt)]
        tensors, conditioning = map(views, spans)
        empty_prompt = self._read_empty(empty) if self.empty_prompt else {}
        return Item(self.keys[index], draw, tensors, conditioning, empty_prompt, empty, spans)

    def _span(self, row: int) -> Span:
        shard, offset, size = self.spans[3 * row : 3 * row + 3]
        memory = self._maps.pop(shard, None) or self._open(self.paths[shard])
        self._maps[shard] = memory  # the one used last stands last
        if len(self._maps) > 64:
            del self._maps[next(iter(self._maps))]
        return Span(memory, offset, size)

    @staticmethod
    def _open(path: Path) -> mmap.mmap:
        try:
            with path.open("rb") as file:
                # Copy on write, so that torch takes it for writable memory.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read the shard {path}: {error}. Start again to encode its samples again"
            ) from error

    def _read_empty(self, row: int) -> dict[str, Tensor]:
        """In memory that workers share with the trainer: it is the same for many samples."""
        if row not in self._empty:
            if len(self._empty) > 8:
                del self._empty[next(iter(self._empty))]
            self._empty[row] = {
                name.removeprefix("empty_"): view[None].clone().share_memory_()
                for name, view in views(self._span(row)).items()
            }
        return self._empty[row]


def collate(items: list[Item]) -> LatentBatch:
    """Copy samples of one size into one batch, in shared memory where a worker does it."""
    tensors = default_collate([item.tensors for item in items])
    prompt = default_collate([item.prompt for item in items])
    for span in [span for item in items for span in item.spans]:
        span.forget()
    empty = items[0].empty_prompt
    if any(item.empty_id != items[0].empty_id for item in items):
        empty = {name: torch.cat([item.empty_prompt[name] for item in items]) for name in empty}
    return LatentBatch(
        keys=[item.key for item in items],
        draws=[item.draw for item in items],
        target_mean=tensors["target_mean"],
        target_std=tensors.get("target_std"),
        controls=[tensors[f"control_{number}"] for number in range(len(tensors)) if f"control_{number}" in tensors],
        prompt=prompt,
        empty_prompt=empty,
        mask=tensors["mask"].float() / 255 if "mask" in tensors else None,
    )
