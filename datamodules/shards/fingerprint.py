"""The fingerprint of all settings that encoded tensors depend on: it decides which cache a run may use."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.base import Model
from datamodules.errors import UserError, listing
from datamodules.shards.stores import working_folder

log = logging.getLogger("retouch")

# Increased when the shard format changes.
FORMAT = 3
# The word in data.shards that is replaced by the fingerprint of the run.
FINGERPRINT = "FINGERPRINT"


def fingerprint_parts(model: Model, memo: Path) -> dict[str, Any]:
    """Return all settings that encoded tensors depend on; `memo` as for `Fingerprinted.fingerprint_parts`."""
    return {"format": FORMAT, **model.encoder.fingerprint_parts(memo)}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Return the hash of `parts`, which names the cache."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def memo(cache_dir: str) -> Path:
    """Return the file with the checksums of a local model's files."""
    return working_folder(cache_dir) / "models.jsonl"


def check_fit(built: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Compare the parts of a cache with those of this run.

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


def check_preserved(prompts: Sequence[str], where: str) -> None:
    """Raise a UserError for preserved prompts that shards do not contain: all but the empty one."""
    if others := [f'"{prompt}"' for prompt in prompts if prompt]:
        raise UserError(
            f"objective.preserve.prompts: {where} contains no conditioning of {listing(others)}. Train on data.root, "
            'which is encoded with it, or preserve [""] only.'
        )


def _show(value: Any) -> str:
    text = json.dumps(value).translate(str.maketrans("", "", '{}"'))
    return text if len(text) < 100 else f"{text[:97]}..."
