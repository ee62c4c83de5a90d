"""A cache that was copied here from elsewhere."""

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import reading
from datamodules.images.sample_set import choose_held_out
from datamodules.shards.cache import Cache
from datamodules.shards.fingerprint import check_fit
from datamodules.shards.index import ShardIndex
from datamodules.shards.manifest import INDEX, MANIFEST, index_matches, read_manifest


def check_preserved(prompts: Sequence[str], where: str) -> None:
    """Raise a UserError for preserve prompts whose conditioning shards do not hold: all but the empty one."""
    if others := [f'"{prompt}"' for prompt in prompts if prompt]:
        raise UserError(
            f"objective.preserve.prompts: {where} holds no conditioning of {listing(others)}: train on data.root, "
            'which is encoded with it, or preserve [""] alone'
        )


def verified_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a cache that was copied here; raises UserError if it or the index is missing or damaged."""
    with reading(folder / MANIFEST, "copy it again"):
        manifest = read_manifest(folder)
    with reading(folder / INDEX, "copy it again"):
        if not index_matches(folder, manifest):
            raise ValueError("it does not match manifest.json")
    return manifest


def open_copied(folder: Path, wanted: Mapping[str, Any]) -> ShardIndex:
    """The index of the cache in a folder, whose files are checked.

    Args:
        wanted: the fingerprint's parts of this run.

    Raises:
        UserError: a file is missing or incomplete, or the cache is of other settings.
    """
    if not (folder / MANIFEST).exists():
        raise UserError(f"data.shards={folder}: no {MANIFEST}")
    manifest = verified_manifest(folder)
    check_fit(manifest["parts"], wanted, f"data.shards={folder}")
    for name, facts in manifest["shards"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != facts["bytes"]:
            raise UserError(f"data.shards={folder}: {name} is incomplete: copy it again")
    with reading(folder / INDEX, "copy it again"):
        index = ShardIndex(Cache(folder, {}).rows())
    index.forget_ids()
    if not index.numbers:
        raise UserError(f"data.shards={folder}: no samples")
    return index


def hold_out(index: ShardIndex, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """The numbers of so many samples to hold out, and of those to train on."""
    if count == 0:
        return [], index.numbers
    first = [number for number in index.numbers if index.is_first[number]]
    names = [index.keys[number] for number in first]
    held = sorted(choose_held_out(names, names, count, "samples"))
    held_names = {names[place] for place in held}
    learned = array("i", (number for number in index.numbers if index.keys[number] not in held_names))
    return [first[place] for place in held], learned
