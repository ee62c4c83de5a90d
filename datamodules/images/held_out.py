"""Which samples are held out for validation."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import cache

from datamodules.errors import UserError, listing
from datamodules.files import Packed
from datamodules.images.sample import Picture, Sample, place
from datamodules.images.sample_set import SampleSet


def held_out_of(
    sample_set: SampleSet,
    samples: Sequence[Sample],
    count: int,
    noun: str,
    checksum: Callable[[Picture], str | None] = lambda picture: None,
) -> set[int]:
    """The numbers of the samples to hold out: those of data.val_root, or `count` others; see `choose_held_out`.

    Args:
        checksum: the sha256 of a picture, where it is remembered; else it is read.
    """
    keys = [sample.key for sample in samples]
    named = {number for number, sample in enumerate(samples) if sample in sample_set.held_out}
    shown = shown_pictures(samples, count, checksum)
    return choose_held_out(keys, shown, named, sample_set.val_paths, count, noun)


def shown_pictures(
    samples: Sequence[Sample], count: int, checksum: Callable[[Picture], str | None] = lambda picture: None
) -> Sequence[Hashable]:
    """For each sample what its pictures are known by, as `choose_held_out` groups them.

    Files are known by their places. What stands inside of a larger file is known by its bytes: tables have a picture
    once for each of its instructions.

    Args:
        count: data.val_count; without it nothing is read, and each sample is a group of its own.
        checksum: as for `held_out_of`.
    """
    if count == 0:
        return range(len(samples))

    @cache
    def known_by(picture: Picture) -> Hashable:
        if not isinstance(picture, Packed):
            return place(picture)
        return checksum(picture) or hashlib.sha256(picture.read()).hexdigest()

    return [frozenset(map(known_by, (sample.target, *sample.controls))) for sample in samples]


def choose_held_out(
    keys: Sequence[str], pictures: Sequence[Hashable], named: set[int], val_roots: list[str], count: int, noun: str
) -> set[int]:
    """The numbers of the samples to hold out; the choice does not depend on the run's seed.

    Args:
        keys: the samples' names.
        pictures: for each sample its pictures; samples that share them (other instructions, source and target
            exchanged) are held out together.
        named: the samples of data.val_root, which are all held out.
        val_roots: data.val_root.
        count: data.val_count; a few more are held out where samples share their pictures.
        noun: what the samples are.

    Raises:
        UserError: none is left to train on.
    """
    held = set(named)
    if held and len(held) == len(keys):
        raise UserError(
            f"data.val_root={listing(val_roots)} has all {len(keys)} {noun} of data.root: none is left to train on"
        )
    if count == 0:
        return held
    first: dict[Hashable, int] = {}
    more: dict[Hashable, list[int]] = {}  # few: a list for each of a million samples would take seconds
    for index, one in enumerate(pictures):
        if first.setdefault(one, index) != index:
            more.setdefault(one, []).append(index)
    order = sorted(first, key=lambda one: hashlib.sha256(keys[first[one]].encode()).digest())
    for one in order:
        if len(held) < count:
            held.update([first[one], *more.get(one, [])])
    if held and len(held) == len(keys):
        most = len(keys) - 1 - len(more.get(order[-1], []))
        remedy = f"at most data.val_count={most}" if most else "leave it out: all of them share the same pictures"
        raise UserError(f"data.val_count={count} of {len(keys)} {noun} leaves none to train on: {remedy}")
    return held
