"""The shard format: WebDataset tars of safetensors members, each followed by its JSON."""

import hashlib
import json
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.files import DAMAGED, replacing, sha256
from datamodules.images.framing import Size

# A row of an index: `id` names the members ID.safetensors and ID.json; `shard`, `offset` and `bytes` locate the
# safetensors. A row with a `key` is a sample, one without is a prompt's conditioning.
Row = dict[str, Any]


def size_of(row: Row) -> Size:
    """The sizes of a sample, which all samples of a batch have in common."""
    # Lists, not generators: this is called for every sample at every start.
    beside = [name for name in ("mask", "rejected") if row.get(name)]
    return tuple([(width, height) for width, height in row["sizes"]]), tuple(beside)


def sample_id(prompts: Sequence[str], files: Sequence[tuple[str, str]], windows: Sequence[Any]) -> str:
    """The id of a sample by its content.

    Args:
        files: (role, sha256) of each, in order.
        windows: what is seen of its pictures.
    """
    return _digest(json.dumps([prompts, files, windows]))[:32]


def prompt_id(kind: str, prompt: str, images: Sequence[str] = ()) -> str:
    """The id of a prompt's conditioning.

    Args:
        kind: `prompt` or `empty_prompt`.
        images: what each condition image that the text encoder sees is known by.
    """
    return f"{kind}-{_digest(json.dumps([prompt, *images]))[:32]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class OpenShard:
    """A tar that is being written, perhaps after an interruption.

    What was added survives a killed process; after a power cut, checksums tell which groups are intact.

    Args:
        path: of the tar; an existing one is truncated after its last intact group.
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
        """Bytes written so far."""
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
            # Last: a group is complete once its JSON is written.
            self._member(f"{id}.json", json.dumps(facts).encode())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror or error}. What is encoded so far is kept: free some "
                "space and run the same command again"
            ) from error
        self.ids.add(id)
        self.rows.append({"shard": self.path.name, "offset": offset, "bytes": len(data), **facts})

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, BytesIO(data))

    def seal(self) -> None:
        """Finish the tar and write its rows beside it."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        write_rows(self.path, self.rows, sha256(self.path))


def rows_path(shard: Path) -> Path:
    """The file with a shard's rows, until they are merged into the index."""
    return shard.with_suffix(".jsonl")


def write_rows(shard: Path, rows: Iterable[Row], checksum: str | None) -> None:
    """Write a shard's rows next to it, after a line with its checksum (None for a tar that is not sealed)."""
    stat, text = shard.stat(), "".join(json.dumps(row) + "\n" for row in rows)
    facts = {"shard": shard.name, "sha256": checksum, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    with replacing(rows_path(shard)) as temporary:
        head = json.dumps({**facts, "crc32": zlib.crc32((json.dumps(facts) + text).encode())})
        temporary.write_text(f"{head}\n{text}", encoding="utf-8")


def rows_beside(shard: Path) -> tuple[Row, list[Row]]:
    """Read the file next to a shard, as `parse_rows` does."""
    return parse_rows(rows_path(shard).read_text(encoding="utf-8"), shard.name)


def parse_rows(text: str, shard: str) -> tuple[Row, list[Row]]:
    """Split the text of a file next to a shard into the facts of its first line, and the rows.

    Raises:
        ValueError, KeyError, TypeError: it is damaged.
    """
    head, _, rest = text.partition("\n")
    facts = json.loads(head)
    if facts.pop("crc32") != zlib.crc32((json.dumps(facts) + rest).encode()) or facts["shard"] != shard:
        raise ValueError("it is not as it was written")
    return facts, [json.loads(line) for line in rest.splitlines()]


def read_rows(path: Path) -> Iterator[Row]:
    """The lines of a file of rows, except a last line that was cut short."""
    parse = json.JSONDecoder().raw_decode  # of a million rows json.loads takes nearly twice as long
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                row, end = parse(line)
                if end + 1 != len(line):
                    raise ValueError(f"more than one object in a line: {line[end:].strip()[:40]}")
                yield row


def facts_beside(shard: Path) -> Row | None:
    """The facts of the first line beside a shard; None where the file is missing or damaged."""
    try:
        return rows_beside(shard)[0]
    except (FileNotFoundError, *DAMAGED):
        return None


def rows_of(shard: Path) -> list[Row]:
    """The rows beside a shard; where they are damaged, as since a build was killed, those that it holds."""
    try:
        return rows_beside(shard)[1]
    except DAMAGED:
        return scan(shard)[0] if shard.exists() else []


def count_rows(path: Path) -> Counter[str] | None:
    """How many rows of each shard a file of rows has; None if it is damaged."""
    try:
        return Counter(row["shard"] for row in read_rows(path) if "sha256" in row or row["offset"] + row["bytes"])
    except DAMAGED:
        return None


def written_checksum(shard: Path) -> str | None:
    """The checksum beside a shard that was sealed."""
    checksum: str | None = rows_beside(shard)[0]["sha256"]
    return checksum


def scan(path: Path) -> tuple[list[Row], int]:
    """The rows of the groups of a tar up to the first one that is not intact, and the position where they end."""
    rows: list[Row] = []
    end = 0
    data: tuple[str, int, int, int] | None = None
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                member = tar.extractfile(info)
                if member is None:  # not a file: not written by `OpenShard`
                    break
                content = member.read()
                id, _, suffix = info.name.rpartition(".")
                if suffix == "safetensors":
                    data = (id, info.offset_data, info.size, zlib.crc32(content))
                    continue
                facts = json.loads(content)
                if data is None or not data[0] == id == facts["id"] or data[3] != facts["crc32"]:
                    break
                rows.append({"shard": path.name, "offset": data[1], "bytes": data[2], **facts})
                end = info.offset_data - (-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    except (tarfile.TarError, ValueError, KeyError):
        pass  # cut short here: what came before is intact
    return rows, end
