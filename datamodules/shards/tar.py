"""The shard format: plain WebDataset tars of safetensors members, each with its JSON."""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.files import replacing, sha256

# A line of an index: `id` names the members ID.safetensors and ID.json; `shard`, `offset` and `bytes` say where the
# safetensors are. A row with a `key` is a sample, one without is the conditioning of a prompt.
Row = dict[str, Any]


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
        lines = [json.dumps({"shard": shard.name, "sha256": checksum}), *map(json.dumps, rows)]
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
