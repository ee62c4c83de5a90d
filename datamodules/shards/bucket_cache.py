"""A cache in a bucket, to which each tar is uploaded as soon as it is full."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from datamodules.files import DAMAGED, reading
from datamodules.shards.bucket import Bucket
from datamodules.shards.cache import Cache
from datamodules.shards.manifest import INDEX, MANIFEST, parse_manifest, write_index_and_manifest
from datamodules.shards.stores import local_folder
from datamodules.shards.tar import OpenShard, Row, parse_rows, rows_path


def cache_of(cache_dir: str, name: str, parts: Mapping[str, Any]) -> Cache:
    """Return the cache of this fingerprint below data.cache_dir."""
    folder = local_folder(cache_dir) / name
    if "://" not in cache_dir:
        return Cache(folder, parts)
    return BucketCache(folder, parts, Bucket(f"{cache_dir.rstrip('/')}/{name}", "data.cache_dir"))


class BucketCache(Cache):
    """The shards of one fingerprint, in a bucket.

    A tar is followed by the file with its rows, which stays there: the next build lists these files. The index and the
    manifest come last, so a reader, who starts with the manifest, never sees an incomplete cache.

    Args:
        folder: on this machine; holds tars that are not full yet, and the checksums of the samples' files.
        bucket: the cache's folder in the bucket.
    """

    on_disk = False

    def __init__(self, folder: Path, parts: Mapping[str, Any], bucket: Bucket) -> None:
        super().__init__(folder, parts)
        self.bucket = bucket

    def __str__(self) -> str:
        return str(self.bucket)

    def rows(self) -> Iterator[Row]:
        for _, rows in self._uploaded():
            yield from rows

    def _uploaded(self) -> Iterator[tuple[Row, list[Row]]]:
        """Read the facts and the rows of each tar that was uploaded completely."""
        there = self.bucket.names()
        for name in sorted(there):
            tar = str(Path(name).with_suffix(".tar"))
            if fnmatch(name, "latents-*.jsonl") and tar in there:
                with reading(f"{self.bucket}/{name}", "delete it and start again: its samples are encoded again"):
                    facts, rows = parse_rows((self.bucket.read(name) or b"").decode(), tar)
                if there[tar]["size"] == facts["bytes"]:
                    yield facts, rows

    def open_shard(self, rank: int, full: int) -> OpenShard:
        # A random number: another command may upload a tar of this rank at the same time.
        return OpenShard(self.folder / f"latents-{rank:05d}-{secrets.randbelow(10**9):09d}.tar")

    def seal(self, shard: OpenShard) -> None:
        super().seal(shard)
        tar, rows = shard.path, rows_path(shard.path)
        for path in (tar, rows):
            self.bucket.write(path.name, path)
        for path in (rows, tar):  # `recover` looks for tars
            path.unlink()

    def recover(self) -> None:
        """Upload the tars that a killed build left on this machine, unless others have uploaded their samples."""
        if tars := sorted(self.folder.glob("latents-*.tar")):
            uploaded = self.sample_ids()
            for tar in tars:
                shard = OpenShard(tar)
                if shard.rows and uploaded.isdisjoint(shard.ids):
                    self.seal(shard)
                else:
                    tar.unlink()

    def merge(self) -> None:
        self.checksums.merge()
        # Another command may upload tars meanwhile, and write an index and a manifest of its own.
        while self.manifest()["shards"].keys() != (shards := self._shards()).keys():
            rows = (row for row in self.rows() if row["shard"] in shards)
            write_index_and_manifest(self.folder, self.parts, rows, shards)
            for name in (INDEX, MANIFEST):
                self.bucket.write(name, self.folder / name)

    def _shards(self) -> dict[str, Any]:
        """Return the facts of each tar that was uploaded, as the manifest has them."""
        return {
            facts["shard"]: {"bytes": facts["bytes"], "sha256": facts["sha256"], "mtime_ns": 0}
            for facts, _ in self._uploaded()
        }

    def manifest(self) -> dict[str, Any]:
        with suppress(*DAMAGED):
            return parse_manifest(self.bucket.read(MANIFEST) or b"")
        return {"shards": {}}
