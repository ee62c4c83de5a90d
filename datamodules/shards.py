"""The shard format: WebDataset tars of safetensors members, an index into them, and a manifest.

A cache is a folder named by its fingerprint. While it is built, each process appends to a tar of its own; a tar that is
full gets its rows beside it (`NAME.jsonl`), and at the end the first process merges these into index.jsonl and
manifest.json. Whenever a build is killed, what stands in the tars is found again.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.files import FileHashes, Hashed, replacing, sha256

log = logging.getLogger("retouch")

FORMAT = 1
INDEX, MANIFEST = "index.jsonl", "manifest.json"
# A line of an index: `id` names the members ID.safetensors and ID.json; `shard`, `offset` and `bytes` say where the
# safetensors are. A row with a `key` is a sample, one without is the conditioning of a prompt.
Row = dict[str, Any]


def fingerprint_parts(module: Any, memo: Path) -> dict[str, Any]:
    """All that cached tensors depend on beside the samples themselves.

    Args:
        module: an EditModule.
        memo: see `EditModule.encoding_parts`.
    """
    return {"format": FORMAT, **module.encoding_parts(memo)}


def fingerprint(parts: Mapping[str, Any]) -> str:
    """The name of the cache whose tensors depend on `parts`."""
    return _digest(json.dumps(parts, sort_keys=True))[:16]


def sample_id(prompt: str, files: Sequence[tuple[str, str]]) -> str:
    """A sample by its content: the prompt and (role, sha256) of each file, in order."""
    return _digest(json.dumps([prompt, *files]))[:32]


def prompt_id(kind: str, prompt: str, images: Sequence[str] = ()) -> str:
    """The conditioning of a prompt; `images` are the sha256 of every condition image that the text encoder sees.

    `kind` is `prompt` or `empty_prompt`.
    """
    return f"{kind}-{_digest(json.dumps([prompt, *images]))[:32]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class OpenShard:
    """A tar that is being written, or goes on being.

    What `add` has returned from survives a killed process; what a power cut leaves is found by its checksums.

    Args:
        path: of the tar; what follows the whole groups that it begins with is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows, end = scan(path) if path.exists() else ([], 0)
        self._file = path.open("r+b" if path.exists() else "x+b")
        self._file.truncate(end)
        self._file.seek(end)
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)
        self.ids = {row["id"] for row in self.rows}
        rows_path(path).unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return int(self._tar.offset)

    def add(self, id: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Append ID.safetensors and ID.json.

        Raises:
            UserError: the disk is full.
        """
        data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
        facts = {"id": id, **facts, "crc32": zlib.crc32(data)}
        offset = self._tar.offset + tarfile.BLOCKSIZE
        try:
            self._member(f"{id}.safetensors", data)
            # Last: a group is whole once its JSON is there.
            self._member(f"{id}.json", json.dumps(facts).encode())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror or error}. What is encoded so far is kept: make room, "
                "and the same command goes on from there"
            ) from error
        self.ids.add(id)
        self.rows.append({"shard": self.path.name, "offset": offset, "bytes": len(data), **facts})

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, BytesIO(data))

    def seal(self) -> None:
        """Finish the tar and put its rows beside it."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_rows(self.path, self.rows, sha256(self.path))


def rows_path(shard: Path) -> Path:
    """Where a shard's rows stand until they are merged into the index."""
    return shard.with_suffix(".jsonl")


def write_rows(shard: Path, rows: Iterable[Row], checksum: str | None) -> None:
    with replacing(rows_path(shard)) as temporary:
        lines = [json.dumps({"shard": shard.name, "sha256": checksum}), *map(_line, rows)]
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(row: Row) -> str:
    return json.dumps(row)


def read_rows(path: Path) -> Iterator[Row]:
    """The lines of an index; a last line that was cut short is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def scan(path: Path) -> tuple[list[Row], int]:
    """The rows of the whole groups that a tar begins with, each checked against its checksum, and where they end."""
    rows: list[Row] = []
    end = 0
    data: tuple[str, int, int, int] | None = None
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                member = tar.extractfile(info)
                assert member is not None
                content = member.read()
                id, _, suffix = info.name.rpartition(".")
                if suffix == "safetensors":
                    data = (id, info.offset_data, info.size, zlib.crc32(content))
                    continue
                facts = json.loads(content)
                if data is None or data[0] != id or data[3] != facts["crc32"]:
                    break
                rows.append({"shard": path.name, "offset": data[1], "bytes": data[2], **facts})
                end = info.offset_data - (-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    except (tarfile.TarError, ValueError, KeyError):
        pass  # cut short here: what came before is whole
    return rows, end


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
            return json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {"shards": {}}

    def describe(self) -> str:
        """What it holds, for a list."""
        manifest = self.manifest()
        if "parts" not in manifest:
            return "never finished"
        parts = manifest["parts"]
        model = parts["model"].get("repository", "a local model")
        return f"{manifest['samples']} samples of {parts['family']} ({model}, {parts['dtype']})"

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
        counts = self._counts()
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

    def _counts(self) -> Counter[str]:
        """Rows of each shard; none where the index cannot be read."""
        try:
            return Counter(row["shard"] for row in self._index())
        except (ValueError, KeyError):
            (self.folder / INDEX).unlink()
            return Counter()

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
                file.write(_line(row) + "\n")
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
            "shards": dict(sorted(shards.items())),
        }
        with replacing(self.folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
