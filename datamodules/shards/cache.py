"""A cache: the shards of one fingerprint, their index and their manifest.

While it is built, each process appends to a tar of its own. The index rows of a full tar are written to a file beside
it (`NAME.jsonl`); at the end the first process merges these files into index.jsonl and manifest.json. Samples in the
tars of a build that was killed are recovered by the next one.
"""

import errno
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datamodules.files import DAMAGED, FileHashes, Hashed, reading, replacing, sha256
from datamodules.shards.manifest import INDEX, MANIFEST, index_matches, read_manifest, write_index_and_manifest
from datamodules.shards.tar import OpenShard, Row, read_rows, rows_path, scan, write_rows

log = logging.getLogger("retouch")


class Cache:
    """The shards of one fingerprint.

    Args:
        folder: whose name is the fingerprint.
        parts: what the fingerprint is computed from.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.parts = dict(parts)

    def manifest(self) -> dict[str, Any]:
        """The manifest; one without shards if it is missing or damaged."""
        try:
            return read_manifest(self.folder)
        except (FileNotFoundError, *DAMAGED):
            return {"shards": {}}

    def verified_manifest(self) -> dict[str, Any]:
        """The manifest of a cache that was copied here; raises UserError if it or the index is missing or damaged."""
        with reading(self.folder / MANIFEST, "copy it again"):
            manifest = read_manifest(self.folder)
        with reading(self.folder / INDEX, "copy it again"):
            if not index_matches(self.folder, manifest):
                raise ValueError("it does not match manifest.json")
        return manifest

    def describe(self) -> str:
        """What the cache holds, in a few words."""
        manifest = self.manifest()
        if "parts" not in manifest:
            return "never finished"
        parts = manifest["parts"]
        model = parts.get("model", {}).get("repository", "a local model")
        return f"{manifest.get('samples')} samples of {parts.get('family')} ({model}, {parts.get('dtype')})"

    def hashes(self) -> FileHashes:
        """The checksums of the samples' files that were read before."""
        return FileHashes(sorted(self.folder.glob("files*.jsonl"), key=lambda path: path.name != "files.jsonl"))

    def remember(self, rank: int, hashed: Iterable[Hashed]) -> None:
        """Add checksums of files to the list of this process; `merge` joins the lists."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"files-{rank:05d}.jsonl").open("a", encoding="utf-8") as file:
            for one in hashed:
                file.write(FileHashes.line(one))

    def sample_ids(self, prompts: bool = False) -> set[str]:
        """The ids of all encoded samples, and of all prompts if these are asked for, too."""
        return {row["id"] for row in self.rows() if "key" in row or prompts}

    def unmerged(self) -> list[Path]:
        """The tars whose rows are not in the index yet, but in a file beside them."""
        return [path.with_suffix(".tar") for path in sorted(self.folder.glob("latents-*.jsonl"))]

    def rows(self) -> Iterator[Row]:
        """The rows of the index and of the unmerged tars."""
        tars = self.unmerged()
        # A build that was killed while it merged may have left both: the file beside the tar takes precedence.
        merged = self.manifest()["shards"].keys() - {tar.name for tar in tars}
        if merged:
            yield from (row for row in self._index() if row["shard"] in merged)
        for tar in tars:
            lines = read_rows(rows_path(tar))
            next(lines)
            yield from lines

    def open_shard(self, rank: int, full: int) -> OpenShard:
        """The unfinished tar that this process wrote before its build was stopped, or a new one; `full` in bytes."""
        tars = sorted(self.folder.glob(f"latents-{rank:05d}-*.tar"))
        number = int(tars[-1].stem.rpartition("-")[2]) + 1 if tars else 0
        if tars and rows_path(tars[-1]).exists() and self._checksum(tars[-1]) is None:
            shard = OpenShard(tars[-1])
            if shard.size < full:
                return shard
            shard.seal()
        return OpenShard(self.folder / f"latents-{rank:05d}-{number:06d}.tar")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Let one build at a time write here; the system releases the lock when the process ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (self.folder / ".lock").open("w")
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            yield  # read-only: writing would raise later
            return
        with file:
            os.utime(file.fileno())  # the time when the cache was last used
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info(f"another process is filling {self.folder}: waiting for it")
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                log.warning(f"note: no locks in {self.folder} ({error.strerror}): run one build at a time")
            yield

    def recover(self) -> None:
        """Make the index agree with the tars; only one process may do this.

        Tars that are damaged, and tars missing from the index because a build was killed or the index was lost, are
        read up to their last intact sample.
        """
        for path in self.folder.glob(".*.tmp"):
            path.unlink()
        for tar in self.unmerged():
            if not (tar.is_file() and self._checked_rows(rows_path(tar))):
                rows_path(tar).unlink()
        manifest = self.manifest()
        shards: dict[str, Any] = manifest["shards"]
        before = json.dumps(shards)
        for name, facts in list(shards.items()):
            if not self._intact(self.folder / name, facts):
                log.warning(
                    f"the shard {self.folder / name} is damaged or missing: the lost ones of its {facts['samples']} "
                    "samples are encoded again"
                )
                del shards[name]
        counts = self._counts(manifest)
        for name, facts in list(shards.items()):
            if counts[name] != facts["samples"] + facts["prompts"]:
                log.warning(f"the index of {self.folder} does not match {name}: its rows are read from the shard again")
                del shards[name]
        if json.dumps(shards) != before:
            write_index_and_manifest(
                self.folder, self.parts, (row for row in self._index() if row["shard"] in shards), shards
            )
        known = shards.keys() | {path.name for path in self.unmerged()}
        for path in sorted(self.folder.glob("latents-*.tar")):
            if path.name not in known:
                write_rows(path, scan(path)[0], None)

    def lock_is_free(self) -> bool:
        """Whether no build is running here."""
        try:
            with (self.folder / ".lock").open("a") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _index(self) -> Iterator[Row]:
        if (self.folder / INDEX).is_file():
            yield from read_rows(self.folder / INDEX)

    def _counts(self, manifest: Mapping[str, Any]) -> Counter[str]:
        """How many rows the index has of each shard; none if it is damaged, and then it is deleted."""
        index = self.folder / INDEX
        if not index.is_file():
            return Counter()
        rows = self._checked_rows(index) if index_matches(self.folder, manifest) else None
        if rows is None:
            index.unlink()
        return rows or Counter()

    @staticmethod
    def _checked_rows(path: Path) -> Counter[str] | None:
        """How many rows of each shard a file of rows has; None if it is damaged."""
        try:
            return Counter(row["shard"] for row in read_rows(path) if "sha256" in row or row["offset"] + row["bytes"])
        except DAMAGED:
            return None

    @staticmethod
    def _intact(path: Path, facts: dict[str, Any]) -> bool:
        """Whether a shard is as it was written; its checksum is computed only if its modification time has changed."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        if stat.st_size != facts["bytes"]:
            return False
        if stat.st_mtime_ns != facts["mtime_ns"] and sha256(path) != facts["sha256"]:
            return False
        facts["mtime_ns"] = stat.st_mtime_ns
        return True

    def merge(self) -> None:
        """Merge the rows of unmerged tars into index.jsonl and manifest.json; only one process may do this."""
        lists = list(self.folder.glob("files-*.jsonl"))
        if lists:
            with replacing(self.folder / "files.jsonl") as temporary:
                temporary.write_text(self.hashes().lines(), encoding="utf-8")
            for path in lists:
                path.unlink()
        tars = self.unmerged()
        if not tars:
            return
        shards = self.manifest()["shards"]
        for tar in tars:
            if self._checksum(tar) is None:  # of a build that was killed: not sealed yet
                OpenShard(tar).seal()
            stat = tar.stat()
            shards[tar.name] = {
                "bytes": stat.st_size,
                "sha256": self._checksum(tar),
                "mtime_ns": stat.st_mtime_ns,
            }
        write_index_and_manifest(self.folder, self.parts, self.rows(), shards)
        for tar in tars:
            rows_path(tar).unlink()

    @staticmethod
    def _checksum(tar: Path) -> str | None:
        return next(read_rows(rows_path(tar)))["sha256"]
