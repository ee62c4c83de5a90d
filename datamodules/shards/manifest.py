"""The files that describe a cache: index.jsonl lists its rows, manifest.json its shards."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datamodules.files import replacing, sha256
from datamodules.shards.tar import Row

INDEX, MANIFEST = "index.jsonl", "manifest.json"
# The entries of the manifest for each shard.
FACTS = {"bytes": int, "sha256": str, "mtime_ns": int, "samples": int, "prompts": int}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of the cache in a folder, as `parse_manifest` does; raises FileNotFoundError without one."""
    return parse_manifest((folder / MANIFEST).read_bytes())


def parse_manifest(text: bytes) -> dict[str, Any]:
    """Parse a manifest; raises ValueError, KeyError or TypeError if it is damaged."""
    manifest: dict[str, Any] = json.loads(text)
    for facts in manifest["shards"].values():
        if wrong := [name for name, kind in FACTS.items() if not isinstance(facts[name], kind)]:
            raise TypeError(f"{wrong[0]} is {facts[wrong[0]]!r}")
    if not isinstance(manifest["parts"], dict):
        raise TypeError("parts is no object")
    return manifest


def index_matches(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether the index is the one that was written with this manifest (older manifests have no checksum of it)."""
    known = manifest.get("index_sha256")
    return known is None or known == sha256(folder / INDEX)


def write_index_and_manifest(
    folder: Path, parts: Mapping[str, Any], rows: Iterable[Row], shards: dict[str, dict[str, Any]]
) -> None:
    """Write both files, and count the rows of each shard.

    Args:
        parts: what the fingerprint is computed from.
        rows: all rows; may be read lazily from the old index.
        shards: the entries of each shard by its file name; `samples` and `prompts` are filled in.

    Raises:
        UserError: a file cannot be written.
    """
    samples: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    tokens = 0
    with replacing(folder / INDEX) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            if "key" in row:
                samples[row["shard"]] += 1
                tokens += row["tokens"]
                sizes["x".join(map(str, row["sizes"][0]))] += 1
            else:
                prompts[row["shard"]] += 1
    for name, facts in shards.items():
        facts.update(samples=samples[name], prompts=prompts[name])
    manifest: dict[str, Any] = {
        "fingerprint": folder.name,
        "parts": dict(parts),
        "samples": samples.total(),
        "tokens": tokens,
        "bytes": sum(facts["bytes"] for facts in shards.values()),
        "sizes": dict(sizes.most_common()),
        "index_sha256": sha256(folder / INDEX),
        "shards": dict(sorted(shards.items())),
    }
    with replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
