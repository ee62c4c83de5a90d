"""A large cache whose tars are sparse files of the right size."""

import hashlib
import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from datamodules.shards.cache import Cache
from datamodules.shards.tar import Row, write_part

# Of a pair of 1024 x 1024 pixels for FLUX Kontext in bf16, of a prompt, and of the rest of a tar beside each.
SAMPLE_BYTES, PROMPT_BYTES, BESIDE = 1_573_144, 4_196_000, 2048
# (width, height) of buckets of about a megapixel, the most frequent first.
SIDES = [(1024, 1024), (1184, 880), (880, 1184), (1248, 832), (832, 1248), (1360, 768), (768, 1360), (1456, 720)]
WORDS = ["make", "the", "sky", "red", "and", "remove", "old", "car", "from", "street", "add", "snow", "to", "roof"]


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"latents-00000-{number:06d}.tar"


def rows(samples: int, shards: int) -> Iterator[Row]:
    """Yield the rows of an index: each sample has its own prompt, and those of a shard share its empty prompt."""
    chance = random.Random(0)
    each = -(-samples // shards)
    for shard in range(shards):
        name, end = shard_name(shard), 0
        for facts in _members(range(shard * each, min((shard + 1) * each, samples)), chance):
            size = SAMPLE_BYTES if "key" in facts else PROMPT_BYTES
            yield {"shard": name, "offset": end + 512, "bytes": size, **facts, "crc32": chance.getrandbits(32)}
            end += size + BESIDE


def _members(numbers: range, chance: random.Random) -> Iterator[dict[str, Any]]:
    empty = f"empty_prompt-{_hash('')}"
    yield {"id": empty, "caption": ""}
    for number in numbers:
        caption = " ".join(chance.choices(WORDS, k=14))
        prompt = f"prompt-{_hash(f'{number} {caption}')}"
        yield {"id": prompt, "caption": caption}
        size = SIDES[min(int(chance.expovariate(0.7)), len(SIDES) - 1)]
        names = {"id": _hash(str(number)), "key": f"{number // 1000:05d}/{number:08d}", "view": 0}
        text = {"captions": [caption], "prompts": [prompt], "empty_prompt": empty}
        yield {**names, **text, "sizes": [size, size], "mask": False, "tokens": 512 + 2 * (size[0] * size[1] // 256)}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write(folder: Path, samples: int, shards: int) -> None:
    """Write a complete cache whose tars are empty."""
    folder.mkdir(parents=True)
    for name, of_shard in groupby(rows(samples, shards), key=lambda row: row["shard"]):
        own = list(of_shard)
        with (folder / name).open("wb") as file:
            file.truncate(own[-1]["offset"] - 512 + own[-1]["bytes"] + BESIDE)
        write_part(folder / name, own, "0" * 64)
    Cache(folder, {}).merge()
