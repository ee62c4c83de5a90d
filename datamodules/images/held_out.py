"""Which samples are held out for validation."""

import hashlib
from collections.abc import Hashable, Sequence

from datamodules.errors import UserError, listing


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
    groups: dict[Hashable, list[int]] = {}
    for index, one in enumerate(pictures):
        groups.setdefault(one, []).append(index)
    order = sorted(groups.values(), key=lambda group: hashlib.sha256(keys[group[0]].encode()).digest())
    for group in order:
        if len(held) < count:
            held.update(group)
    if held and len(held) == len(keys) and val_roots:
        raise UserError(
            f"data.val_root={listing(val_roots)} has all {len(keys)} {noun} of data.root: none is left to train on"
        )
    if held and len(held) == len(keys):
        most = len(keys) - len(order[-1])
        remedy = f"at most data.val_count={most}" if most else "leave it out: all of them share the same pictures"
        raise UserError(f"data.val_count={count} of {len(keys)} {noun} leaves none to train on: {remedy}")
    return held
