"""Where the samples of local shards are, in compact arrays."""

from array import array
from collections.abc import Iterable
from typing import Any

from datamodules.batch import Size
from datamodules.shards.tar import Row, size_of


class ShardIndex:
    """Where each sample is.

    Args:
        rows: of an index; the prompts of a shard come before the samples that use them.
        named: whether to keep `named_prompts`.

    Attributes:
        shards: their file names.
        spans: for each row three numbers: shard, offset, bytes.
        samples: for each sample four numbers: its own row, the empty prompt's, the first in `prompts`, how many.
        prompts: the rows of the samples' prompts.
        named_prompts: the rows of all prompts by their ids; empty unless they are asked for.
        ids: the samples' numbers by their ids.
        keys, sizes, tokens: of each sample; tokens with its longest prompt.
        is_first: of each, whether it is the first view of what it shows, or the only one.
    """

    def __init__(self, rows: Iterable[Row], named: bool = False) -> None:
        self.spans, self.samples, self.prompts, self.tokens = array("q"), array("q"), array("q"), array("q")
        self.ids: dict[str, int] = {}
        self.keys: list[str] = []
        self.is_first: list[bool] = []
        self.sizes: list[Size] = []
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
            self.keys.append(row["key"])
            self.is_first.append(row.get("view", 0) == 0)
            mine = [prompts[id] for id in row["prompts"]]
            self.samples.extend((number, prompts[row["empty_prompt"]], len(self.prompts), len(mine)))
            self.prompts.extend(mine)
            self.tokens.append(row["tokens"])
            size = size_of(row)
            self.sizes.append(sizes.setdefault(size, size))
        self.shards = list(shards)
        self.named_prompts = prompts if named else {}

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
