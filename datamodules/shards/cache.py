"""A cache: the tars of one fingerprint, on this machine or in a bucket.

Each process of a build writes tars of its own, named by its rank. A full tar gets its part of the index
(`latents-RANK-NUMBER.jsonl`); tars with a part are complete. At the end the first process merges the facts of all parts
into manifest.json. The next build reads the samples of a killed one from its tars.
"""

import errno
import hashlib
import json
import logging
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from datamodules.shards.tar import OpenShard, Part, Row, parse_part, part_path, salvage, write_part
from datamodules.shards.transfer import Bucket, Result
from foundation.files import DAMAGED, file_sha256, read_bytes, reading, remove_temporary, replacing
from foundation.hashes import FileHashes, Hashed
from foundation.locks import in_use, one_at_a_time
from foundation.stores import working_folder

log = logging.getLogger("retouch")

# Increased when the shard format changes.
FORMAT = 3
# The word in data.shards that is replaced by the fingerprint of the run.
FINGERPRINT = "FINGERPRINT"
MANIFEST = "manifest.json"
# The modification time of this file is the last use of the cache.
USED = ".used"
CACHE_REMEDY = "delete it and start again: its samples are encoded again; if data.shards names it, copy it again"


def open_cache(cache_dir: str, parts: Mapping[str, Any]) -> "Cache":
    """Return the cache in data.cache_dir for these settings, whose hash, the fingerprint, is its name.

    Args:
        parts: all settings that encoded tensors depend on.
    """
    parts = {"format": FORMAT, **parts}
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    folder = working_folder(cache_dir) / name
    if "://" not in cache_dir:
        return Cache(folder, parts)
    return BucketCache(folder, parts, Bucket(f"{cache_dir.rstrip('/')}/{name}", "data.cache_dir"))


def parse_manifest(text: bytes) -> dict[str, Any]:
    """Parse a manifest; raises ValueError, KeyError, TypeError or AttributeError if it is damaged."""
    manifest: dict[str, Any] = json.loads(text)
    numbers = [manifest["samples"], manifest["bytes"], *(facts["bytes"] for facts in manifest["shards"].values())]
    if not isinstance(manifest["parts"], dict) or not all(isinstance(number, int) for number in numbers):
        raise TypeError("it lacks an entry")
    return manifest


class Folder:
    """A folder of this machine, read and written like a `Bucket`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by its name, without temporary ones, which may vanish."""
        return {path.name: path.stat().st_size for path in self.path.glob("[!.]*")}

    def read(self, name: str, parse: Callable[[bytes], Result]) -> Result | None:
        """Return the parsed bytes of a file, None if there is none; raises a UserError if it is damaged."""
        path = self.path / name
        with reading(path, CACHE_REMEDY):
            return parse(read_bytes(path)) if path.exists() else None

    def read_range(self, name: str, start: int, size: int, crc32: int) -> bytes:
        """Return a part of a file; raises a UserError if it is missing or is not as it was written."""
        path = self.path / name
        with reading(path, CACHE_REMEDY), path.open("rb", buffering=0) as file:
            file.seek(start)
            data = file.read(size)
            if len(data) < size:
                raise EOFError("it ends too early")
            if zlib.crc32(data) != crc32:
                raise ValueError("its bytes are not as they were written")
        return data

    def write(self, name: str, content: bytes) -> None:
        with replacing(self.path / name) as temporary:
            temporary.write_bytes(content)


class Cache:
    """The tars of one fingerprint in a folder.

    Args:
        folder: named by the fingerprint; tars are written here.
        parts: the settings that the fingerprint is computed from.
        source: the place of complete tars; None for the folder.

    Attributes:
        on_disk: whether the tars stay on this machine.
    """

    on_disk = True

    def __init__(self, folder: Path, parts: Mapping[str, Any], source: Bucket | None = None) -> None:
        self.folder = folder
        self.parts = dict(parts)
        self.source = source or Folder(folder)
        self._locks = ExitStack()

    def __str__(self) -> str:
        return str(self.source)

    def index_parts(self) -> Iterator[Part]:
        """Yield the part of the index about each complete tar.

        Raises:
            UserError: a part is damaged.
        """
        sizes = self.source.sizes()
        for name in sorted(sizes):
            tar = str(Path(name).with_suffix(".tar"))
            if name.startswith("latents-") and name.endswith(".jsonl") and tar in sizes:
                part = self.source.read(name, partial(parse_part, tar=tar))
                if part is not None and sizes[tar] == part.facts["bytes"]:
                    yield part

    def rows(self) -> Iterator[Row]:
        for part in self.index_parts():
            yield from part.rows

    def sample_ids(self, prompts: bool = False) -> set[str]:
        """Return the ids of all encoded samples, with `prompts` also of all prompts."""
        return {row["id"] for row in self.rows() if "key" in row or prompts}

    def manifest(self) -> dict[str, Any]:
        """Return the manifest; one without shards if it is missing or damaged."""
        with suppress(*DAMAGED):
            return parse_manifest(self.source.read(MANIFEST, bytes) or b"")
        return {"shards": {}}

    def file_hashes(self) -> FileHashes:
        return FileHashes(sorted(self.folder.glob("files-*.jsonl")))

    def add_file_hashes(self, rank: int, hashed: Iterable[Hashed]) -> None:
        """Append to the checksums that the process of this rank has computed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"files-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(map(FileHashes.line, hashed))

    def new_shard(self, rank: int) -> OpenShard:
        tars = sorted(self.folder.glob(f"latents-{rank:05d}-*.tar"))
        number = int(tars[-1].stem.rpartition("-")[2]) + 1 if tars else 0
        return OpenShard(self.folder / f"latents-{rank:05d}-{number:06d}.tar")

    def seal(self, shard: OpenShard) -> None:
        shard.seal()

    def touch(self) -> bool:
        """Note that the cache is used now; return whether this process can write to it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / USED).touch()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return False
        return True

    def begin(self, is_first: bool) -> None:
        """Prepare a build. Called by one process; for a cache in a bucket, by one per machine.

        Args:
            is_first: whether this is the first process of all, which keeps other commands waiting.
        """
        if is_first:
            self._locks.enter_context(in_use(self.folder, wait=True))
        with one_at_a_time(self.folder):  # a process of a killed build may still write
            self.recover()

    def join(self) -> None:
        """Take part in a build, after `begin` and before reading the cache."""
        self._locks.enter_context(one_at_a_time(self.folder, shared=True))

    def end(self) -> None:
        self._locks.close()

    def recover(self) -> None:
        """Make the index agree with the tars, after a kill or damage; only one process may do this.

        A damaged or unfinished tar keeps its samples up to the first damaged one.
        """
        remove_temporary(self.folder.glob(".*.tmp"))
        for tar in sorted({path.with_suffix(".tar") for path in self.folder.glob("latents-*")}):
            if not self._is_intact(tar):
                salvage(tar)

    def _is_intact(self, tar: Path) -> bool:
        """Return whether a tar and its part are as written; the checksum is computed only if the tar's time changed."""
        path = part_path(tar)
        if not path.exists():
            return False  # the tar of a killed build
        try:
            part = parse_part(read_bytes(path), tar.name)
        except DAMAGED:
            return False
        facts = part.facts
        if tar.exists() and (status := tar.stat()).st_size == facts["bytes"]:
            if status.st_mtime_ns == facts["mtime_ns"]:
                return True
            if file_sha256(tar) == facts["sha256"]:
                write_part(tar, part.rows, facts["sha256"])
                return True
        log.warning(f"the shard {tar} is damaged or missing: its lost samples are encoded again")
        return False

    def merge(self) -> None:
        """Merge the facts of all tars into the manifest; only one process may do this."""
        shards: dict[str, Any] = {}
        ids: set[str] = set()
        for facts, rows in self.index_parts():
            own = {row["id"] for row in rows if "key" in row}
            shards[facts["shard"]] = {"bytes": facts["bytes"], "sha256": facts["sha256"], "samples": len(own)}
            ids |= own
        manifest: dict[str, Any] = {
            "fingerprint": self.folder.name,
            "parts": self.parts,
            "samples": len(ids),
            "bytes": sum(facts["bytes"] for facts in shards.values()),
            "shards": shards,
        }
        if manifest != self.manifest():
            self.source.write(MANIFEST, f"{json.dumps(manifest, indent=1)}\n".encode())


class BucketCache(Cache):
    """The tars of one fingerprint in a bucket: each is uploaded when it is full, and its part after it.

    The manifest comes last, so a reader never sees an incomplete cache.

    Args:
        folder: on this machine; contains unfinished tars and the checksums of the samples' files.
        source: the cache's folder in the bucket.
    """

    on_disk = False
    source: Bucket

    def new_shard(self, rank: int) -> OpenShard:
        # The numbers of the tars in the bucket are not known here.
        return OpenShard(self.folder / f"latents-{rank:05d}-{secrets.randbelow(10**9):09d}.tar")

    def seal(self, shard: OpenShard) -> None:
        super().seal(shard)
        self._upload(shard.path)

    def _upload(self, tar: Path) -> None:
        for path in (tar, part_path(tar)):
            self.source.write(path.name, path)
        for path in (part_path(tar), tar):  # a tar without its part is salvaged
            path.unlink()

    def recover(self) -> None:
        """Upload the tars that a killed build left on this machine, unless others have uploaded their samples."""
        super().recover()
        tars = sorted(self.folder.glob("latents-*.tar"))
        uploaded = self.sample_ids() if tars else set()
        for tar in tars:
            rows = parse_part(part_path(tar).read_bytes(), tar.name).rows
            if uploaded.isdisjoint(row["id"] for row in rows if "key" in row):
                self._upload(tar)
            else:
                tar.unlink()
                part_path(tar).unlink()
