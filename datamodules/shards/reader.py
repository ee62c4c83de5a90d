"""The samples of a cache: found by its index, and read as batches by random access into its tars."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from datamodules.batch import LatentBatch, stack_padded
from datamodules.images.resizing import Size
from datamodules.images.sample_set import choose_held_out
from datamodules.sampler import FIRST, Choices
from datamodules.shards.cache import CACHE_REMEDY, MANIFEST, Folder, parse_manifest
from datamodules.shards.tar import Row, parse_part, size_of
from datamodules.shards.transfer import Bucket
from foundation.errors import UserError
from foundation.files import reading

log = logging.getLogger("retouch")


class Place(NamedTuple):
    """The place of a safetensors in a tar.

    Attributes:
        text_tokens: number of tokens of a prompt; 0 for a sample.
    """

    shard: str
    offset: int
    size: int
    crc32: int
    text_tokens: int


class EncodedSample(NamedTuple):
    """A sample of a cache.

    Attributes:
        size: sizes of its images, which the samples of a batch have in common.
        tokens: number of the transformer's tokens with its longest prompt.
        is_first: whether it is the first view of its images.
        prompts: place of each caption's conditioning.
        preserved: prompts of which a batch contains one, alongside a caption.
        captions: empty if they are not known.
        weight: weight in the loss.
    """

    key: str
    size: Size
    tokens: int
    is_first: bool
    latents: Place
    prompts: Sequence[Place]
    empty_prompt: Place
    preserved: Sequence[Place] = ()
    captions: Sequence[str] = ()
    weight: float = 1.0

    def preserving(self, prompts: Sequence[Place]) -> "EncodedSample":
        """Return the sample with prompts of which each batch contains one; the longest counts as its tokens."""
        longest, own = (max(prompt.text_tokens for prompt in some) for some in (prompts, self.prompts))
        return self._replace(preserved=prompts, tokens=self.tokens + max(0, longest - own))

    def chosen_prompts(self, choices: Choices, draw: int) -> tuple[int | None, list[Place]]:
        """Return the index of a draw's caption, None where it is dropped, and the places of its prompts.

        They are the prompt and, in training, a preserved prompt if there are any.
        """
        caption = choices.caption(draw, len(self.prompts))
        others = self.preserved if choices.seed is not None else []
        return caption, [
            self.empty_prompt if caption is None else self.prompts[caption],
            *([others[choices.preserved(draw, len(others))]] if others else []),
        ]


class Index(NamedTuple):
    """The samples and the prompts of a cache by id."""

    samples: dict[str, EncodedSample]
    prompts: dict[str, Place]


def index_of(rows: Iterable[Row]) -> Index:
    """Return the index of a cache's rows; in each tar the prompts come before the samples that use them."""
    index = Index({}, {})
    for row in rows:
        place = Place(row["shard"], row["offset"], row["bytes"], row["crc32"], row.get("text_tokens", 0))
        if "key" not in row:
            index.prompts.setdefault(row["id"], place)
            continue
        index.samples[row["id"]] = EncodedSample(
            row["key"],
            size_of(row),
            row["tokens"],
            row.get("view", 0) == 0,
            place,
            [index.prompts[id] for id in row["prompts"]],
            index.prompts[row["empty_prompt"]],
        )
    return index


def open_shards(source: Folder | Bucket, wanted: Mapping[str, Any]) -> list[EncodedSample]:
    """Return the samples of the cache in data.shards.

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
        path = source.path / tar if isinstance(source, Folder) else None  # in a bucket, reading finds the damage
        is_whole = path is None or (path.is_file() and path.stat().st_size == manifest["shards"][tar]["bytes"])
        if part is None or not is_whole:
            raise UserError(f"{where}: {tar} is incomplete. Copy it and its .jsonl again.")
        return part.rows

    with ThreadPoolExecutor() as pool, reading(str(source), CACHE_REMEDY):
        index = index_of(chain.from_iterable(pool.map(rows, manifest["shards"])))
    if not index.samples:
        raise UserError(f"{where}: it contains no samples. Choose another cache.")
    return list(index.samples.values())


def check_fit(built: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Compare the parts of a cache with this run's.

    Other library versions are only noted: the last bits may be rounded differently.

    Args:
        where: the cache, for messages.

    Raises:
        UserError: any other part differs.
    """
    different = sorted(name for name in built.keys() | wanted.keys() if built.get(name) != wanted.get(name))
    if different == ["versions"]:
        log.warning(
            f"note: {where} was encoded with {_show(built['versions'])}, this run has {_show(wanted['versions'])}"
        )
    elif different:
        what = ", ".join(f"{name} {_show(built.get(name))} (here {_show(wanted.get(name))})" for name in different)
        raise UserError(
            f"{where} does not match this run: it was encoded with {what}. Encode it again, or change these settings."
        )


def _show(value: Any) -> str:
    text = json.dumps(value).translate(str.maketrans("", "", '{}"'))
    return text if len(text) < 100 else f"{text[:97]}..."


def hold_out(samples: list[EncodedSample], count: int) -> tuple[list[EncodedSample], list[EncodedSample]]:
    """Return `count` samples to hold out, with their first views only, and the samples to train on."""
    if count == 0:
        return [], samples
    first = [sample for sample in samples if sample.is_first]
    keys = [sample.key for sample in first]
    held = [first[place] for place in sorted(choose_held_out(keys, keys, count, "samples"))]
    held_keys = {sample.key for sample in held}
    return held, [sample for sample in samples if sample.key not in held_keys]


@dataclass
class LatentReader:
    """Reads batches from the tars of a folder or bucket.

    Attributes:
        empty_prompt: whether batches include the empty prompt's conditioning.
        choices: the random choices of captions, condition images and preserved prompts.
    """

    source: Folder | Bucket
    samples: Sequence[EncodedSample]
    empty_prompt: bool
    choices: Choices = FIRST

    def __post_init__(self) -> None:
        self._read_shared = lru_cache(maxsize=8)(self._read)
        self._weighted = any(sample.weight != 1 for sample in self.samples)

    def __call__(self, items: list[tuple[int, int]]) -> LatentBatch:
        """Return the batch of these samples, which must be of one size: (index of the sample, index of the draw)."""
        samples = [self.samples[index] for index, _ in items]
        draws = [draw for _, draw in items]
        chosen = [sample.chosen_prompts(self.choices, draw) for sample, draw in zip(samples, draws, strict=True)]
        captions = [caption for caption, _ in chosen]
        prompts, *preserved = zip(*(places for _, places in chosen), strict=True)
        empty = [sample.empty_prompt for sample in samples] if self.empty_prompt else []
        empty = empty[:1] if len(set(empty)) == 1 else empty
        tensors = stack_padded([self._read(sample.latents) for sample in samples])
        kept = self.choices.references(draws[0], len(samples[0].size[0]) - 1)
        return LatentBatch(
            keys=[sample.key for sample in samples],
            draws=draws,
            target_mean=tensors["target_mean"],
            target_std=tensors.get("target_std"),
            controls=[tensors[f"control_{place}"] for place in kept],
            prompt=stack_padded([self._read(place) for place in prompts]),
            empty_prompt=stack_padded([self._read_shared(place) for place in empty]) if empty else {},
            mask=tensors["mask"].float() / 255 if "mask" in tensors else None,
            prompts=[
                "" if own is None else one.captions[own]
                for one, own in zip(samples, captions, strict=True)
                if one.captions
            ],
            weights=torch.tensor([sample.weight for sample in samples]) if self._weighted else None,
            rejected_mean=tensors.get("rejected_mean"),
            rejected_std=tensors.get("rejected_std"),
            preserve_prompt=stack_padded([self._read(place) for place in preserved[0]]) if preserved else {},
            dropped=[caption is None for caption in captions],
            has_first=0 in kept,
        )

    def _read(self, place: Place) -> dict[str, Tensor]:
        """Return the tensors at a place; raises a UserError if they are not as they were written."""
        data = self.source.read_range(place.shard, place.offset, place.size, place.crc32)
        with reading(f"{self.source}/{place.shard}", CACHE_REMEDY):
            tensors = safetensors.torch.load(data)
        # The empty prompt's tensors have names of their own in a tar.
        return {name.removeprefix("empty_"): tensor for name, tensor in tensors.items()}
