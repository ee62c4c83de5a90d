"""A cache: the shards of one fingerprint, their index and their manifest.

While it is built, each process appends to a tar of its own; a tar that is full gets its rows beside it (`NAME.jsonl`),
and at the end the first process merges these into index.jsonl and manifest.json. Whenever a build is killed, what
stands in the tars is found again.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datamodules.errors import UserError
from datamodules.files import DAMAGED, FileHashes, Hashed, reading, replacing, sha256
from datamodules.shards.tar import OpenShard, Row, read_rows, rows_path, scan, write_rows

log = logging.getLogger("retouch")

FORMAT = 1
INDEX, MANIFEST = "index.jsonl", "manifest.json"
# What manifest.json says of a shard.
FACTS = {"bytes": int, "sha256": str, "mtime_ns": int, "samples": int, "prompts": int}


def fingerprint_parts(module: Any, memo: Path) -> dict[str, Any]:
    """All that cached tensors depend on beside the samples themselves.

    Args:
        module: an EditModule.
        memo: see `EditModule.encoding_parts`.
    """
    return {"format": FORMAT, **module.encoding_parts(memo)}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """The name of the cache whose tensors depend on `parts`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def check_fit(built: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Compare what a cache was built with to what this run would build.

    Other versions of the libraries are only said: their rounding may differ in the last bits.

    Raises:
        UserError: something else differs.
    """
    different = sorted(name for name in built.keys() | wanted.keys() if built.get(name) != wanted.get(name))
    if different == ["versions"]:
        log.warning(f"note: {where} was encoded with {_show(built['versions'])}, here are {_show(wanted['versions'])}")
    elif different:
        what = ", ".join(f"{name} {_show(built.get(name))} (here {_show(wanted.get(name))})" for name in different)
        raise UserError(f"{where} does not fit this run: it was encoded with {what}. Build it again, or set these")


def _show(value: Any) -> str:
    text = json.dumps(value).translate(str.maketrans("", "", '{}"'))
    return text if len(text) < 100 else f"{text[:97]}..."


class Cache:
    """The shards of one fingerprint.

    Args:
        folder: named by the fingerprint.
        parts: what the fingerprint is made of.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.parts = dict(parts)

    def manifest(self) -> dict[str, Any]:
        """manifest.json; one without shards where there is none that can be used."""
        try:
            return self._read_manifest()
        except (FileNotFoundError, *DAMAGED):
            return {"shards": {}}

    def given_manifest(self) -> dict[str, Any]:
        """That of a cache which this run did not build; raises UserError where it, or the index, is not as written."""
        with reading(self.folder / MANIFEST, "copy it again"):
            manifest = self._read_manifest()
        with reading(self.folder / INDEX, "copy it again"):
            if not self._index_is_as_written(manifest):
                raise ValueError("it is not the one that manifest.json knows")
        return manifest

    def _read_manifest(self) -> dict[str, Any]:
        manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        for facts in manifest["shards"].values():
            if wrong := [name for name, kind in FACTS.items() if not isinstance(facts[name], kind)]:
                raise TypeError(f"{wrong[0]} is {facts[wrong[0]]!r}")
        if not isinstance(manifest["parts"], dict):
            raise TypeError("parts is no object")
        return manifest

    def _index_is_as_written(self, manifest: Mapping[str, Any]) -> bool:
        """Whether index.jsonl is the one that was written with this manifest (older ones do not tell)."""
        known = manifest.get("index_sha256")
        return known is None or known == sha256(self.folder / INDEX)

    def describe(self) -> str:
        """What it holds, for a list."""
        manifest = self.manifest()
        if "parts" not in manifest:
            return "never finished"
        parts = manifest["parts"]
        model = parts.get("model", {}).get("repository", "a local model")
        return f"{manifest.get('samples')} samples of {parts.get('family')} ({model}, {parts.get('dtype')})"

    def hashes(self) -> FileHashes:
        """The checksums of the samples' files, as far as they were read before."""
        return FileHashes(sorted(self.folder.glob("files*.jsonl"), key=lambda path: path.name != "files.jsonl"))

    def remember(self, rank: int, hashed: Iterable[Hashed]) -> None:
        """Note checksums of files; each process has a list of its own until `merge`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"files-{rank:05d}.jsonl").open("a", encoding="utf-8") as file:
            for one in hashed:
                file.write(FileHashes.line(one))

    def sample_ids(self) -> set[str]:
        return {row["id"] for row in self.rows() if "key" in row}

    def unmerged(self) -> list[Path]:
        """The tars whose rows stand beside them."""
        return [path.with_suffix(".tar") for path in sorted(self.folder.glob("latents-*.jsonl"))]

    def rows(self) -> Iterator[Row]:
        """All rows that are known."""
        tars = self.unmerged()
        # A build that was killed while it merged may have left both: then the rows beside the tar count.
        merged = self.manifest()["shards"].keys() - {tar.name for tar in tars}
        if merged:
            yield from (row for row in self._index() if row["shard"] in merged)
        for tar in tars:
            lines = read_rows(rows_path(tar))
            next(lines)
            yield from lines

    def open_shard(self, rank: int, full: int) -> OpenShard:
        """The tar that this process was writing when its build was stopped, or a new one."""
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
        """Let one build at a time write here; the lock goes with the process, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (self.folder / ".lock").open("w")
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            yield  # may be read, but not written: whoever tries to write will hear of it
            return
        with file:
            os.utime(file.fileno())  # says when the cache was last used
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info(f"another process is filling {self.folder}: waiting for it")
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                log.warning(f"note: no locks in {self.folder} ({error.strerror}): start one build at a time")
            yield

    def recover(self) -> None:
        """Bring the folder in order after whatever happened to it; one process alone may do this.

        Tars that are damaged, and tars that the index does not know because a build was killed or the index was
        lost, are read for the whole samples that they begin with.
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
                    f"the shard {self.folder / name} is damaged or gone: what it lacks of its {facts['samples']} "
                    "samples is encoded again"
                )
                del shards[name]
        counts = self._counts(manifest)
        for name, facts in list(shards.items()):
            if counts[name] != facts["samples"] + facts["prompts"]:
                log.warning(f"the index of {self.folder} lacks {name}: it is read from the shard again")
                del shards[name]
        if json.dumps(shards) != before:
            self._write((row for row in self._index() if row["shard"] in shards), shards)
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
        """Rows of each shard; none where the index is not as it was written."""
        index = self.folder / INDEX
        if not index.is_file():
            return Counter()
        rows = self._checked_rows(index) if self._index_is_as_written(manifest) else None
        if rows is None:
            index.unlink()
        return rows or Counter()

    @staticmethod
    def _checked_rows(path: Path) -> Counter[str] | None:
        """How many rows of each shard a list has; None where one is no row."""
        try:
            return Counter(row["shard"] for row in read_rows(path) if "sha256" in row or row["offset"] + row["bytes"])
        except DAMAGED:
            return None

    @staticmethod
    def _intact(path: Path, facts: dict[str, Any]) -> bool:
        """Whether a shard is what was written; its bytes are read again only where its time has changed."""
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
        """Take the rows beside the tars into index.jsonl and manifest.json; one process alone may do this."""
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
            if self._checksum(tar) is None:  # found after a killed build: not closed yet
                OpenShard(tar).seal()
            stat = tar.stat()
            shards[tar.name] = {
                "bytes": stat.st_size,
                "sha256": self._checksum(tar),
                "mtime_ns": stat.st_mtime_ns,
            }
        self._write(self.rows(), shards)
        for tar in tars:
            rows_path(tar).unlink()

    @staticmethod
    def _checksum(tar: Path) -> str | None:
        return next(read_rows(rows_path(tar)))["sha256"]

    def _write(self, rows: Iterable[Row], shards: dict[str, Any]) -> None:
        samples: Counter[str] = Counter()
        prompts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        tokens = 0
        with replacing(self.folder / INDEX) as temporary, temporary.open("w", encoding="utf-8") as file:
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
        manifest = {
            "fingerprint": self.folder.name,
            "parts": self.parts,
            "samples": samples.total(),
            "tokens": tokens,
            "bytes": sum(facts["bytes"] for facts in shards.values()),
            "sizes": dict(sizes.most_common()),
            "index_sha256": sha256(self.folder / INDEX),
            "shards": dict(sorted(shards.items())),
        }
        with replacing(self.folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
