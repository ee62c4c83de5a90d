"""A cache that was copied here from elsewhere."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import reading
from datamodules.shards.cache import Cache
from datamodules.shards.fingerprint import check_fit
from datamodules.shards.index import ShardIndex
from datamodules.shards.manifest import INDEX, MANIFEST


def check_preserved(prompts: Sequence[str], where: str) -> None:
    """Raise a UserError for preserve prompts whose conditioning shards do not hold: all but the empty one."""
    if others := [f'"{prompt}"' for prompt in prompts if prompt]:
        raise UserError(
            f"objective.preserve.prompts: {where} holds no conditioning of {listing(others)}: train on data.root, "
            'which is encoded with it, or preserve [""] alone'
        )


def open_copied(folder: Path, wanted: Mapping[str, Any]) -> ShardIndex:
    """The index of the cache in a folder, whose files are checked.

    Args:
        wanted: the fingerprint's parts of this run.

    Raises:
        UserError: a file is missing or incomplete, or the cache is of other settings.
    """
    given = Cache(folder, {})
    if not (folder / MANIFEST).exists():
        raise UserError(f"data.shards={folder}: no {MANIFEST}")
    manifest = given.verified_manifest()
    check_fit(manifest["parts"], wanted, f"data.shards={folder}")
    for name, facts in manifest["shards"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != facts["bytes"]:
            raise UserError(f"data.shards={folder}: {name} is incomplete: copy it again")
    with reading(folder / INDEX, "copy it again"):
        index = ShardIndex(given.rows())
    if not index.ids:
        raise UserError(f"data.shards={folder}: no samples")
    return index
