"""Where the samples of local shards are, in compact arrays."""

from array import array
from collections.abc import Iterable
from typing import Any

from datamodules.images.framing import Size
from datamodules.shards.names import Names
from datamodules.shards.tar import Row, size_of
from datamodules.sizes import Sizes


class ShardIndex:
    """Where each sample is.

    Args:
        rows: of an index; the prompts of a shard come before the samples that use them.

    Attributes:
        shards: their file names.
        spans: for each row three numbers: shard, offset, bytes.
        checksums: of each row's bytes, by zlib.crc32.
        samples: for each sample four numbers: its own row, the empty prompt's, the first in `prompts`, how many.
        prompts: the rows of the samples' prompts.
        named_prompts: the rows of all prompts by their ids, until `forget_ids`.
        ids: the samples' numbers by their ids, until `forget_ids`.
        numbers: the samples' numbers; of those with the same id, the last one's alone.
        keys, sizes, tokens: of each sample; tokens with its longest prompt.
        is_first: of each, whether it is the first view of what it shows, or the only one.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.spans = spans = array("q")
        self.checksums = checksums = array("I")
        self.samples, self.prompts, self.tokens = array("i"), array("i"), array("i")
        self.ids: dict[str, int] = {}
        self.named_prompts: dict[str, int] = {}
        self.keys = Names()
        self.is_first = bytearray()
        codes = array("i")
        shards: dict[str, int] = {}
        sizes: dict[Size, int] = {}
        prompts = self.named_prompts
        for number, row in enumerate(rows):
            spans.extend((shards.setdefault(row["shard"], len(shards)), row["offset"], row["bytes"]))
            checksums.append(row["crc32"])
            if "key" not in row:
                prompts.setdefault(row["id"], number)
                continue
            self.ids[row["id"]] = len(self.keys)
            self.keys.append(row["key"])
            self.is_first.append(row.get("view", 0) == 0)
            mine = [prompts[id] for id in row["prompts"]]
            self.samples.extend((number, prompts[row["empty_prompt"]], len(self.prompts), len(mine)))
            self.prompts.extend(mine)
            self.tokens.append(row["tokens"])
            codes.append(sizes.setdefault(size_of(row), len(sizes)))
        self.shards = list(shards)
        self.numbers = array("i", self.ids.values())
        self.sizes = Sizes(list(sizes), codes)

    def forget_ids(self) -> None:
        """Free the memory of what only finding samples needs: more than all the rest takes."""
        self.ids, self.named_prompts = {}, {}

    def prompts_of(self, number: int) -> "array[int]":
        """The rows of a sample's prompts."""
        first, count = self.samples[4 * number + 2 : 4 * number + 4]
        return self.prompts[first : first + count]

    def empty_prompt_of(self, number: int) -> int:
        """The row of a sample's empty prompt."""
        return self.samples[4 * number + 1]

    def shapes(self, number: int) -> tuple[Any, ...]:
        """What two samples have in common whose tensors have the same shapes, whichever prompt is drawn."""
        rows = self.prompts_of(number)
        return self.sizes[number], self.tokens[number], frozenset(self.spans[3 * row + 2] for row in rows)
