"""A cache: the shards of one fingerprint, their index and their manifest.

While it is built, each process writes tars of its own, named by its rank. The index rows of a full tar are written to a
file next to it (`NAME.jsonl`); at the end the first process merges these files into index.jsonl and manifest.json. The
next build recovers the samples of a killed one from its tars.
"""

import errno
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from datamodules.files import DAMAGED, remove_temporary, replacing, sha256
from datamodules.shards.checksums import Checksums
from datamodules.shards.manifest import INDEX, index_matches, read_manifest, write_index_and_manifest
from datamodules.shards.tar import (
    OpenShard,
    Row,
    count_rows,
    facts_beside,
    read_rows,
    rows_of,
    rows_path,
    scan,
    write_rows,
    written_checksum,
)

log = logging.getLogger("retouch")

# Its time is when the cache was last used.
USED = ".used"


class Cache:
    """The shards of one fingerprint.

    Args:
        folder: whose name is the fingerprint.
        parts: what the fingerprint is computed from.

    Attributes:
        checksums: of the samples' files that were read before.
        on_disk: whether the tars stay on this machine.
    """

    on_disk = True

    def __init__(self, folder: Path, parts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.parts = dict(parts)
        self.checksums = Checksums(folder)

    def __str__(self) -> str:
        return str(self.folder)

    def tars(self) -> dict[str, int]:
        """The tars that there are, with their sizes in bytes."""
        return {path.name: path.stat().st_size for path in self.folder.glob("latents-*.tar")}

    def manifest(self) -> dict[str, Any]:
        """The manifest; one without shards if it is missing or damaged."""
        try:
            return read_manifest(self.folder)
        except (FileNotFoundError, *DAMAGED):
            return {"shards": {}}

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
            yield from rows_of(tar)

    def open_shard(self, rank: int, full: int) -> OpenShard:
        """Open the unfinished tar of a rank, or a new one.

        Args:
            full: bytes at which a tar is full.
        """
        tars = sorted(self.folder.glob(f"latents-{rank:05d}-*.tar"))
        number = int(tars[-1].stem.rpartition("-")[2]) + 1 if tars else 0
        if tars and rows_path(tars[-1]).exists() and written_checksum(tars[-1]) is None:
            shard = OpenShard(tars[-1])
            if shard.size < full:
                return shard
            self.seal(shard)
        return OpenShard(self.folder / f"latents-{rank:05d}-{number:06d}.tar")

    def seal(self, shard: OpenShard) -> None:
        """Finish a tar."""
        shard.seal()

    def touch(self, by: str | None = None) -> bool:
        """Note that the cache is used now, and by what; return whether anything can be written here."""
        used = self.folder / USED
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            used.touch()
            if by is not None:
                with replacing(used) as temporary:
                    temporary.write_text("\n".join([*(one for one in self.users() if one != by), by]) + "\n", "utf-8")
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            return False
        return True

    def users(self) -> list[str]:
        """What has used the cache, the latest last."""
        used = self.folder / USED
        return used.read_text(encoding="utf-8").splitlines() if used.is_file() else []

    def recover(self) -> None:
        """Make the index agree with the tars; only one process may do this.

        Tars that are damaged, and tars missing from the index because a build was killed or the index was lost, are
        read up to their last intact sample.
        """
        remove_temporary(self.folder.glob(".*.tmp"))
        tars = self.tars()
        for tar in self.unmerged():
            if not self._unmerged_intact(tar, tars):
                rows_path(tar).unlink()
        manifest = self.manifest()
        shards: dict[str, Any] = manifest["shards"]
        before = json.dumps(shards)
        for name, facts in list(shards.items()):
            if not self._intact(name, facts, tars):
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
            rows = (row for row in self._index() if row["shard"] in shards)
            write_index_and_manifest(self.folder, self.parts, rows, shards)
        for name in sorted(tars.keys() - shards.keys() - {path.name for path in self.unmerged()}):
            write_rows(self.folder / name, scan(self.folder / name)[0], None)

    def _unmerged_intact(self, tar: Path, tars: Mapping[str, int]) -> bool:
        """Whether a tar that is not in the index yet has its rows beside it, and both are as they were written."""
        facts = facts_beside(tar)
        if facts is None or tar.name not in tars:
            return False
        return facts["sha256"] is None or self._intact(tar.name, facts, tars)

    def _index(self) -> Iterator[Row]:
        if (self.folder / INDEX).is_file():
            yield from read_rows(self.folder / INDEX)

    def _counts(self, manifest: Mapping[str, Any]) -> Counter[str]:
        """How many rows the index has of each shard; none if it is damaged, and then it is deleted."""
        index = self.folder / INDEX
        if not index.is_file():
            return Counter()
        rows = count_rows(index) if index_matches(self.folder, manifest) else None
        if rows is None:
            index.unlink()
        return rows or Counter()

    def _intact(self, name: str, facts: dict[str, Any], tars: Mapping[str, int]) -> bool:
        """Whether a shard is as it was written; its checksum is computed only if its modification time has changed.

        Args:
            tars: those that there are.
        """
        if tars.get(name) != facts["bytes"]:
            return False
        path = self.folder / name
        modified = path.stat().st_mtime_ns
        if modified != facts["mtime_ns"] and sha256(path) != facts["sha256"]:
            return False
        facts["mtime_ns"] = modified
        return True

    def merge(self) -> None:
        """Merge the rows of unmerged tars into index.jsonl and manifest.json; only one process may do this."""
        self.checksums.merge()
        unmerged = self.unmerged()
        if not unmerged:
            return
        shards = self.manifest()["shards"]
        for tar in unmerged:
            if written_checksum(tar) is None:  # of a build that was killed: not sealed yet
                self.seal(OpenShard(tar))
        sizes = self.tars()
        for tar in unmerged:
            facts = {"sha256": written_checksum(tar), "mtime_ns": tar.stat().st_mtime_ns}
            shards[tar.name] = {"bytes": sizes[tar.name], **facts}
        write_index_and_manifest(self.folder, self.parts, self.rows(), shards)
        for tar in unmerged:
            rows_path(tar).unlink()
