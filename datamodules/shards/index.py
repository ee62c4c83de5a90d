"""The index of a cache, in compact arrays."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from datamodules.errors import UserError
from datamodules.files import reading
from datamodules.images.resizing import Size
from datamodules.images.sample_set import choose_held_out
from datamodules.sampler import Sizes
from datamodules.shards.cache import MANIFEST, REMEDY, Folder, parse_manifest
from datamodules.shards.fingerprint import check_fit
from datamodules.shards.tar import Row, parse_part, size_of
from datamodules.shards.transfer import Bucket


class ShardIndex:
    """The position of each sample in the tars.

    Args:
        rows: of a cache; in each tar the prompts come before the samples that use them.

    Attributes:
        shards: the tars' file names.
        spans: for each row three numbers: shard, offset, bytes.
        checksums: zlib.crc32 of each row's bytes.
        text_tokens: of each row that is a prompt; 0 for a sample.
        samples: for each sample four numbers: its own row, the empty prompt's, the first in `prompts`, their count.
        prompts: the rows of the samples' prompts.
        named_prompts: the rows of all prompts by id, until `forget_ids`.
        ids: the samples' indices by id, until `forget_ids`.
        numbers: the samples' indices; only the last of several with the same id.
        keys, sizes, tokens: of each sample; tokens with its longest prompt.
        is_first: for each sample, whether it is the first view of its images, or the only one.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.spans = array("q")
        self.checksums = array("I")
        self.text_tokens, self.samples, self.prompts, self.tokens = (array("i") for _ in range(4))
        self.ids: dict[str, int] = {}
        self.named_prompts: dict[str, int] = {}
        self.keys: list[str] = []
        self.is_first = bytearray()
        codes = array("i")
        shards: dict[str, int] = {}
        sizes: dict[Size, int] = {}
        prompts = self.named_prompts
        for number, row in enumerate(rows):
            self.spans.extend((shards.setdefault(row["shard"], len(shards)), row["offset"], row["bytes"]))
            self.checksums.append(row["crc32"])
            self.text_tokens.append(row.get("text_tokens", 0))
            if "key" not in row:
                prompts.setdefault(row["id"], number)
                continue
            self.ids[row["id"]] = len(self.keys)
            self.keys.append(row["key"])
            self.is_first.append(row.get("view", 0) == 0)
            own = [prompts[id] for id in row["prompts"]]
            self.samples.extend((number, prompts[row["empty_prompt"]], len(self.prompts), len(own)))
            self.prompts.extend(own)
            self.tokens.append(row["tokens"])
            codes.append(sizes.setdefault(size_of(row), len(sizes)))
        self.shards = list(shards)
        self.numbers = array("i", self.ids.values())
        self.sizes = Sizes(list(sizes), codes)

    def forget_ids(self) -> None:
        """Free the ids, which take more memory than the rest."""
        self.ids, self.named_prompts = {}, {}

    def prompts_of(self, number: int) -> "array[int]":
        """Return the rows of a sample's prompts."""
        first, count = self.samples[4 * number + 2 : 4 * number + 4]
        return self.prompts[first : first + count]

    def empty_prompt_of(self, number: int) -> int:
        """Return the row of a sample's empty prompt."""
        return self.samples[4 * number + 1]


def open_shards(source: Folder | Bucket, wanted: Mapping[str, Any]) -> ShardIndex:
    """Return the index of the cache in data.shards.

    Args:
        wanted: the fingerprint's parts of this run.

    Raises:
        UserError: a file is missing or incomplete, or the cache was encoded with other settings.
    """
    where = f"data.shards={source}"
    manifest = source.read(MANIFEST, parse_manifest)
    if manifest is None:
        raise UserError(f"{where}: it contains no {MANIFEST}. Name the whole folder of a cache.")
    check_fit(manifest["parts"], wanted, where)

    def rows(tar: str) -> list[Row]:
        part = source.read(f"{Path(tar).stem}.jsonl", partial(parse_part, tar=tar))
        path = source.path / tar if isinstance(source, Folder) else None  # reading finds what is wrong in a bucket
        is_whole = path is None or (path.is_file() and path.stat().st_size == manifest["shards"][tar]["bytes"])
        if part is None or not is_whole:
            raise UserError(f"{where}: {tar} is incomplete. Copy it and its .jsonl again.")
        return part.rows

    with ThreadPoolExecutor() as pool, reading(str(source), REMEDY):
        index = ShardIndex(chain.from_iterable(pool.map(rows, manifest["shards"])))
    index.forget_ids()
    if not index.numbers:
        raise UserError(f"{where}: it contains no samples. Choose another cache.")
    return index


def hold_out(index: ShardIndex, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the indices of the samples to hold out, `count` in number, and of those to train on."""
    if count == 0:
        return [], index.numbers
    first = [number for number in index.numbers if index.is_first[number]]
    names = [index.keys[number] for number in first]
    held = sorted(choose_held_out(names, names, count, "samples"))
    held_names = {names[place] for place in held}
    learned = array("i", (number for number in index.numbers if index.keys[number] not in held_names))
    return [first[place] for place in held], learned
