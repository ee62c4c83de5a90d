"""The shard format: WebDataset tars of safetensors, each followed by its JSON, and a part of the index per tar."""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from datamodules.images.resizing import Size
from foundation.errors import UserError
from foundation.files import file_sha256, replacing

# A row of the index: `id` names the members ID.safetensors and ID.json; `shard`, `offset` and `bytes` locate the
# safetensors. A row with a `key` is a sample, one without is a prompt's conditioning.
Row = dict[str, Any]


class Part(NamedTuple):
    """The part of the index about one tar.

    Attributes:
        facts: the tar's file name (`shard`), `bytes`, `sha256` and `mtime_ns`.
        rows: rows of its members, in order.
    """

    facts: Row
    rows: list[Row]


def size_of(row: Row) -> Size:
    """Return the sizes of a sample; all samples of a batch have them in common."""
    extra = [name for name in ("mask", "rejected") if row.get(name)]
    return tuple([(width, height) for width, height in row["sizes"]]), tuple(extra)


def sample_id(prompts: Sequence[str], files: Sequence[tuple[str, str]], windows: Sequence[Any]) -> str:
    """Return the id of a sample, derived from its content.

    Args:
        files: (role, sha256) of each, in order.
        windows: the visible part of each image.
    """
    return _digest(json.dumps([prompts, files, windows]))[:32]


def prompt_id(kind: str, prompt: str, images: Sequence[str] = ()) -> str:
    """Return the id of a prompt's conditioning.

    Args:
        kind: `prompt` or `empty_prompt`.
        images: the identity of each condition image that the text encoder sees.
    """
    return f"{kind}-{_digest(json.dumps([prompt, *images]))[:32]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class OpenShard:
    """A tar that is being written. Its members survive a killed process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.ids: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb")
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)

    @property
    def size(self) -> int:
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
            self._member(f"{id}.json", json.dumps(facts).encode())  # last: it completes the group
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror or error}. The samples encoded so far are kept. Free some "
                "space and run the same command again."
            ) from error
        self.ids.add(id)
        self.rows.append({"shard": self.path.name, "offset": offset, "bytes": len(data), **facts})

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, BytesIO(data))

    def seal(self) -> None:
        """Finish the tar and write its part of the index."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_part(self.path, self.rows, file_sha256(self.path))


def part_path(tar: Path) -> Path:
    return tar.with_suffix(".jsonl")


def write_part(tar: Path, rows: Iterable[Row], checksum: str) -> None:
    """Write a tar's part of the index: a line about the tar, with a checksum of the whole part, and a line per row."""
    stat, text = tar.stat(), "".join(json.dumps(row) + "\n" for row in rows)
    facts = {"shard": tar.name, "sha256": checksum, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    with replacing(part_path(tar)) as temporary:
        head = json.dumps({**facts, "crc32": zlib.crc32((json.dumps(facts) + text).encode())})
        temporary.write_bytes(f"{head}\n{text}".encode())  # as text, Windows would change the line ends


def parse_part(text: bytes, tar: str) -> Part:
    """Parse a tar's part of the index.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is damaged.
    """
    head, _, rest = text.partition(b"\n")
    facts = json.loads(head)
    if facts.pop("crc32") != zlib.crc32(json.dumps(facts).encode() + rest) or facts["shard"] != tar:
        raise ValueError("it is not as it was written")
    return Part(facts, json.loads(b"[" + rest.strip().replace(b"\n", b",") + b"]"))


def scan(path: Path) -> tuple[list[Row], int]:
    """Return the rows of a tar up to the first member that does not match its facts, and the offset of their end."""
    rows: list[Row] = []
    id, data, offset, end = "", b"", 0, 0
    with suppress(tarfile.TarError, ValueError, KeyError, TypeError), tarfile.open(path, "r:") as tar:
        for info in tar:
            tar.members = []  # type: ignore[attr-defined]  # else it keeps them all in memory
            file, (name, _, suffix) = tar.extractfile(info), info.name.rpartition(".")
            content = b"" if file is None else file.read()
            if suffix == "safetensors":
                id, data, offset = name, content, info.offset_data
                continue
            facts = json.loads(content)
            if not id == name == facts["id"] or zlib.crc32(data) != facts["crc32"]:
                break
            rows.append({"shard": path.name, "offset": offset, "bytes": len(data), **facts})
            end = info.offset_data - (-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    return rows, end


def salvage(tar: Path) -> None:
    """Cut an unfinished or damaged tar after its last intact group and seal it; remove it if there is no such group."""
    part_path(tar).unlink(missing_ok=True)
    if not tar.exists():
        return
    rows, end = scan(tar)
    if not rows:
        tar.unlink()
        return
    with tar.open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    write_part(tar, rows, file_sha256(tar))
