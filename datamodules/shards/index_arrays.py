"""index.npz: what `ShardIndex` keeps of index.jsonl, as the arrays that it keeps.

Of a million samples they are read in a tenth of the time. They are never needed: where they are missing, damaged or of
another index.jsonl, that one is read.
"""

import json
import logging
import zipfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.errors import UserError
from datamodules.files import DAMAGED, replacing
from datamodules.shards.index import ShardIndex
from datamodules.shards.tar import read_rows
from datamodules.sizes import Sizes

log = logging.getLogger("retouch")

ARRAYS = "index.npz"
# Increased when ShardIndex keeps something else.
FORMAT = 2
NUMBERS, KEYS = ("spans", "checksums", "samples", "prompts", "tokens", "numbers"), ("starts", "ends")


def write_arrays(index: Path, checksum: str) -> None:
    """Write them beside an index.jsonl with this checksum."""
    try:
        known = ShardIndex(read_rows(index))
        facts = {"format": FORMAT, "sha256": checksum, "shards": known.shards, "sizes": known.sizes.kinds}
        arrays: dict[str, Any] = {"codes": known.sizes.codes}
        arrays |= {name: np.asarray(getattr(known, name)) for name in NUMBERS}
        arrays |= {name: np.asarray(getattr(known.keys, name)) for name in KEYS}
        raw: dict[str, bytes | bytearray] = {"text": known.keys.text, "is_first": known.is_first}
        raw["facts"] = json.dumps(facts).encode()
        arrays |= {name: np.frombuffer(value, np.uint8) for name, value in raw.items()}
        with replacing(index.with_name(ARRAYS)) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
    except (UserError, *DAMAGED) as error:
        log.warning(f"note: {index.with_name(ARRAYS)} was not written, so each start reads {index.name} ({error})")


def read_arrays(index: Path, checksum: str) -> ShardIndex | None:
    """The index whose index.jsonl has this checksum, without the ids; None where that is to be read itself."""
    try:
        # Each array has a checksum of its own, which is compared.
        with np.load(index.with_name(ARRAYS)) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            if (facts["format"], facts["sha256"]) != (FORMAT, checksum):
                return None
            found = ShardIndex([])
            for owner, names in ((found, NUMBERS), (found.keys, KEYS)):
                for name in names:
                    setattr(owner, name, array(getattr(owner, name).typecode, arrays[name].tobytes()))
            found.keys.text, found.is_first = bytearray(arrays["text"]), bytearray(arrays["is_first"])
            found.shards = facts["shards"]
            kinds = [(tuple(map(tuple, images)), tuple(beside)) for images, beside in facts["sizes"]]
            found.sizes = Sizes(kinds, arrays["codes"])
    except (OSError, zipfile.BadZipFile, *DAMAGED):
        return None
    return found
