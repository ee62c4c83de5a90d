"""The fingerprint of all that encoded tensors depend on beside the samples: it decides which cache a run may use."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.base import Model
from datamodules.errors import UserError
from datamodules.shards.stores import local_folder

log = logging.getLogger("retouch")

# Increased when the shard format changes.
FORMAT = 2
# The word in data.shards that is replaced by the fingerprint of the run.
FINGERPRINT = "FINGERPRINT"


def fingerprint_parts(model: Model, memo: Path) -> dict[str, Any]:
    """All that encoded tensors depend on beside the samples; `memo` as for `Fingerprinted.fingerprint_parts`."""
    return {"format": FORMAT, **model.encoder.fingerprint_parts(memo)}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """The hash of `parts`, which names the cache."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def check_fit(built: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Compare the parts of a cache with those of this run.

    Other versions of libraries give only a note: their rounding may differ in the last bits.

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
            f"{where} does not match this run: it was encoded with {what}. Build it again, or change these settings"
        )


def _show(value: Any) -> str:
    text = json.dumps(value).translate(str.maketrans("", "", '{}"'))
    return text if len(text) < 100 else f"{text[:97]}..."


def memo(cache_dir: str) -> Path:
    """Where the checksums of a local model's files are remembered."""
    return local_folder(cache_dir) / "models.jsonl"
