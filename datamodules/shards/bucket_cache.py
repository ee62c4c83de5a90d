"""A cache in a bucket: what is small of it has a copy on this machine, tars are read as rows are needed."""

import logging
import os
import secrets
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datamodules.errors import without_credentials
from datamodules.files import replacing, sha256
from datamodules.shards.bucket import Bucket
from datamodules.shards.cache import USED, Cache
from datamodules.shards.index import ShardIndex
from datamodules.shards.index_arrays import ARRAYS
from datamodules.shards.leases import Leases
from datamodules.shards.manifest import INDEX, MANIFEST, index_matches, write_index_and_manifest
from datamodules.shards.stores import local_folder
from datamodules.shards.tar import OpenShard, Row, count_rows, facts_beside, rows_path, scan, write_rows
from datamodules.shards.transfer import DamagedError

log = logging.getLogger("retouch")

# Of this machine: the rows that were read last, of all caches of one data.cache_dir.
READ = "read"


def cache_of(cache_dir: str, name: str, parts: Mapping[str, Any]) -> Cache:
    """The cache of this fingerprint below data.cache_dir."""
    folder = local_folder(cache_dir) / name
    if "://" not in cache_dir:
        return Cache(folder, parts)
    return BucketCache(folder, parts, Bucket(cache_dir, "data.cache_dir").inner(name))


class BucketCache(Cache):
    """The shards of one fingerprint, in a bucket.

    A tar is uploaded when it is full, and after it the file with its rows. So of a process that is lost with its disk
    at most the samples of one tar are encoded again.

    Args:
        folder: on this machine: copies of the index, the manifest and the rows, tars that are not full yet, and the
            checksums of the samples' files, whose times differ between machines.
        bucket: the folder that all machines share.
    """

    on_disk = False

    def __init__(self, folder: Path, parts: Mapping[str, Any], bucket: Bucket) -> None:
        super().__init__(folder, parts)
        self.bucket = bucket

    def __str__(self) -> str:
        return str(self.bucket)

    def leases(self) -> Leases:
        return Leases(self.bucket.inner("building"))

    def touch(self, by: str | None = None) -> bool:
        return super().touch(by) and self.bucket.may_write(USED)

    def tars(self) -> dict[str, int]:
        return {name: one["size"] for name, one in self.bucket.names().items() if fnmatch(name, "latents-*.tar")}

    def readable_tars(self, limit: int) -> "BucketTars":
        return BucketTars(self.bucket, self.folder.parent / READ, self.folder.name, limit)

    def unmerged(self) -> list[Path]:
        # Whose tar is still here is not uploaded yet, so others know nothing of it.
        return [tar for tar in super().unmerged() if not tar.exists()]

    def refresh(self) -> None:
        while True:
            with suppress(FileNotFoundError):  # another machine has just merged rows into the index
                return self._download()

    def _download(self) -> None:
        uploaded = self.unmerged()
        there = self.bucket.names()
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest, here = self.bucket.read(MANIFEST), self.folder / MANIFEST
        if manifest is None or INDEX not in there:  # `recover` makes them again
            for name in (MANIFEST, INDEX, ARRAYS):
                (self.folder / name).unlink(missing_ok=True)
        elif not (here.is_file() and here.read_bytes() == manifest and self._has_index()):
            self.bucket.download(INDEX, self.folder / INDEX)
            (self.folder / ARRAYS).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                self.bucket.download(ARRAYS, self.folder / ARRAYS)
            with replacing(here) as temporary:
                temporary.write_bytes(manifest)
        for tar in uploaded:
            if rows_path(tar).name not in there:  # merged by another machine
                rows_path(tar).unlink(missing_ok=True)
        for name in there:
            if fnmatch(name, "latents-*.jsonl") and not (self.folder / name).exists():
                self.bucket.download(name, self.folder / name)

    def _has_index(self) -> bool:
        return (self.folder / INDEX).is_file() and index_matches(self.folder, self.manifest())

    def _counts(self, manifest: Mapping[str, Any]) -> Counter[str]:
        # What `refresh` has downloaded is as it was uploaded: newer than the manifest, with rows of more tars, where a
        # build was killed between the two.
        return (count_rows(self.folder / INDEX) if (self.folder / INDEX).is_file() else None) or Counter()

    def seal(self, shard: OpenShard) -> None:
        super().seal(shard)
        self._upload(shard.path)

    def _upload(self, tar: Path) -> None:
        self.bucket.write(tar.name, tar)
        self.bucket.write(rows_path(tar).name, rows_path(tar))
        tar.unlink()

    def _upload_left(self, tars: Iterable[Path]) -> None:
        """What earlier commands on this machine have written, and did not upload."""
        for tar in tars:
            facts = facts_beside(tar)
            if facts is not None and facts["sha256"] == sha256(tar):
                self._upload(tar)
            elif (shard := OpenShard(tar)).rows:
                self.seal(shard)
            else:
                tar.unlink()

    def recover_units(self, units: Mapping[int, bool]) -> None:
        for unit in units:
            self._upload_left(self._tars_of(unit))
        self.refresh()

    def open_shard(self, unit: int, full: int) -> OpenShard:
        # Drawn: another machine may upload a tar of this unit at the same time.
        return OpenShard(self.folder / f"latents-{unit:05d}-{secrets.randbelow(10**9):09d}.tar")

    def recover(self) -> None:
        self._upload_left(sorted(self.folder.glob("latents-*.tar")))
        super().recover()

    def _read_rows_again(self, tar: Path) -> None:
        log.warning(f"{self.bucket}: {tar.name} is not in the index: it is downloaded to read its rows")
        self.bucket.download(tar.name, tar)
        write_rows(tar, scan(tar)[0], sha256(tar))
        self._upload(tar)

    def _intact(self, name: str, facts: dict[str, Any], tars: Mapping[str, int]) -> bool:
        return tars.get(name) == facts["bytes"]  # the checksum of each row is compared when it is read

    def _modified(self, tar: Path) -> int:
        return 0

    def _write_index(self, rows: Iterable[Row], shards: dict[str, Any]) -> None:
        # Elsewhere than another command of this machine downloads the bucket's to.
        with TemporaryDirectory(f".{os.getpid()}.tmp", ".merged-", self.folder) as made:
            folder = Path(made, self.folder.name)
            folder.mkdir()
            write_index_and_manifest(folder, self.parts, rows, shards)
            for path in (folder / name for name in (INDEX, ARRAYS, MANIFEST)):
                if path.exists():
                    self.bucket.write(path.name, path)
                    path.replace(self.folder / path.name)

    def _drop_rows(self, tars: Iterable[Path]) -> None:
        tars = list(tars)
        super()._drop_rows(tars)
        self.bucket.remove(rows_path(tar).name for tar in tars)


class FetchedRow:
    """The bytes of one that was fetched."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)

    def read(self, size: int, offset: int) -> bytes:
        return bytes(self.data[offset : offset + size])

    def read_into(self, buffers: Sequence[Any], offset: int) -> int:
        place = offset
        for buffer in buffers:
            part = self.data[place : place + buffer.nbytes]
            buffer[: len(part)] = part
            place += len(part)
        return place - offset


class BucketTars:
    """Reads rows of tars in a bucket, and keeps them on this machine: those that were read last, up to a limit.

    Args:
        bucket: holds the tars.
        folder: of what is kept, for all caches of one data.cache_dir.
        fingerprint: of this cache.
        limit: bytes that are kept.
    """

    def __init__(self, bucket: Bucket, folder: Path, fingerprint: str, limit: int) -> None:
        self.bucket = bucket
        self.fingerprint = fingerprint
        import diskcache  # only caches in buckets need it

        self.folder = folder
        self._failures = OSError, sqlite3.Error, diskcache.Timeout
        self._said = False
        settings = {"size_limit": limit, "eviction_policy": "least-recently-used"}
        self._kept = self._keep(lambda: diskcache.Cache(str(folder), **settings))

    def name(self, index: ShardIndex, row: int) -> str:
        return f"{without_credentials(self.bucket.url)}/{index.shards[index.spans[3 * row]]}"

    def open(self, index: ShardIndex, row: int) -> FetchedRow:
        shard, offset, length = index.spans[3 * row : 3 * row + 3]
        name, checksum = index.shards[shard], index.checksums[row]

        def check(data: bytes) -> None:
            if len(data) != length or zlib.crc32(data) != checksum:
                raise DamagedError(f"{name} is not as it was written")

        key = f"{self.fingerprint}/{name}/{offset}"
        with suppress(DamagedError):
            if self._kept is not None and (data := self._keep(lambda: self._kept.get(key))) is not None:
                check(data)
                return FetchedRow(data)
        fetched = self.bucket.read_range(name, offset, length, check)
        if self._kept is not None:
            self._keep(lambda: self._kept.set(key, fetched))
        return FetchedRow(fetched)

    def _keep(self, work: Any) -> Any:
        """What is kept is never needed: on a full disk rows are fetched each time."""
        try:
            return work()
        except self._failures as error:
            if not self._said:
                log.warning(f"note: {self.folder}: {error}; what is read of {self.bucket} is not kept")
            self._said = True
        return None
