"""Tars of pictures as WebDataset writes them: the members of a sample share their name up to the first dot."""

import json
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import Packed, reason, require_file
from datamodules.images.folders import FORMATS, IMAGE_SUFFIXES, is_clutter
from datamodules.images.prompts import is_text, json_prompts, lines_of
from datamodules.images.rows import Table

SUFFIX = ".tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
# As in WebDataset: folder and name up to the first dot, and the rest.
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)[.]([^/]+)")
# The column of a picture whose name has nothing but its suffix.
PICTURE = "image"
# That of X.txt.
CAPTIONS = "txt"


@dataclass(frozen=True)
class Member(Packed):
    """A picture in an uncompressed tar: where its bytes are.

    Attributes:
        tar: the tar.
        name: its name in there.
        offset, size: in bytes.
    """

    tar: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise EOFError(f"{self.tar} ends early")
        return content

    def signature(self) -> tuple[str, int, int, int]:
        stat = os.stat(self.tar)
        return f"{self.tar}#{self.offset}.{self.name}", stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

    @property
    def stem(self) -> str:
        return Path(self.name).name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.tar}:{self.name}"


@dataclass
class _Scan:
    """What tars hold.

    Attributes:
        samples: by key, the values by column.
        pictures: the columns of pictures.
        unread: by key, a member that may be a picture in another format.
        incomplete: a line about each tar that ends early, and each member that is in doubt.
        in_doubt: the keys of samples with such a member.
        passed_over: how many members are no pictures of anybody.
    """

    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    pictures: dict[str, None] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    in_doubt: set[str] = field(default_factory=set)
    passed_over: int = 0


def is_tar(name: str) -> bool:
    """Whether a root is a tar, or several by braces, as `{000..012}.tar`."""
    return name.endswith((SUFFIX, *COMPRESSED))


def tars_of(folder: Path) -> list[Path]:
    """The tars of a folder, by name."""
    return sorted(path for path in folder.iterdir() if is_tar(path.name) and not is_clutter(path.name))


def named_tars(root: str) -> list[Path]:
    """The tars that a root names, all of its braces' alternatives.

    Raises:
        UserError: one does not exist.
    """
    plain = Path(root).expanduser()
    if plain.exists():
        return [plain]
    try:
        from braceexpand import braceexpand

        paths = [Path(name).expanduser() for name in braceexpand(root)]
    except ValueError as error:
        raise UserError(f"data.root={root}: a brace is left open") from error
    if absent := [str(path) for path in paths if not path.exists()]:
        raise UserError(f"data.root={root}: no such file: {listing(absent)}")
    return paths


def tar_table(place: str, tars: Sequence[Path]) -> tuple[Table, int]:
    """The samples of tars as a table, and how many members were passed over.

    Its columns: `source` for X.source.jpg, `image` for X.jpg, `txt` for the captions of X.txt or else X.json,
    and those of the object in X.json.

    Raises:
        UserError: a tar is compressed or none, or there are no pictures.
    """
    found = _Scan()
    for tar in tars:
        _scan(tar, f"{tar.stem}/" if len(tars) > 1 else "", found)
    if not found.pictures:
        lines = f": {listing(found.incomplete)}" if found.incomplete else ""
        raise UserError(f"data.root={place}: no pictures ({FORMATS}) in the tar{lines}")
    # A text without a picture is no sample, unless its picture is in another format.
    samples = {
        key: values
        for key, values in found.samples.items()
        if key not in found.in_doubt and any(isinstance(value, Member) for value in values.values())
    }
    lost = [
        f"{found.unread[key]} is none of {FORMATS}" for key in found.unread if key in found.samples.keys() - samples
    ]
    columns = list(dict.fromkeys(name for values in samples.values() for name in values))
    return Table(
        place=f"data.root={place}",
        rows=[f"sample {key}" for key in samples],
        columns=columns,
        values=lambda name: [values.get(name) for values in samples.values()],
        pictures=list(found.pictures),
        keys=list(samples),
        incomplete=(*found.incomplete, *lost),
    ), found.passed_over


def _scan(path: Path, prefix: str, found: _Scan) -> None:
    """Add the samples of a tar, from its headers alone but for texts."""
    try:
        require_file(path)
        size = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            _add_members(path, tar, size, prefix, found)
    except tarfile.ReadError as error:
        if path.name.endswith(COMPRESSED) or _is_compressed(path):
            raise UserError(
                f"{path} is compressed, and pictures are read from where they stand: unpack it, or repack it as a "
                "plain .tar (gunzip, unxz, zstd -d)"
            ) from error
        raise UserError(f"{path} is empty or no tar ({reason(error)}): copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd"))


def _add_members(path: Path, tar: tarfile.TarFile, size: int, prefix: str, found: _Scan) -> None:
    """Add all members up to where the tar ends, or is cut."""
    end, last, seen = 0, "its beginning", set()
    try:
        for info in tar:
            blocks = -(-info.size // tarfile.BLOCKSIZE) if info.isreg() else 0
            end = info.offset_data + blocks * tarfile.BLOCKSIZE
            if end > size or info.size < 0:
                break
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            if not info.isdir():
                _add(path, tar, info, prefix, found, twice=info.name in seen)
            seen.add(info.name)
            last = info.name
    except tarfile.ReadError:
        end = size
    with path.open("rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # every tar ends with two empty blocks
            found.incomplete.append(
                f"{path} ends early, or is damaged behind {last}: copy it again, the rest is missing"
            )


def _add(path: Path, tar: tarfile.TarFile, info: tarfile.TarInfo, prefix: str, found: _Scan, twice: bool) -> None:
    """Add a member to its sample; `twice`: whether there was one of that name before."""
    name = info.name.removeprefix("./")
    if any(is_clutter(part) for part in name.split("/")):
        found.passed_over += 1
        return
    if (match := _MEMBER.fullmatch(name)) is None:
        return
    key, (column, _, suffix) = prefix + match[1], match[2].rpartition(".")
    if twice or not info.isreg() or info.sparse is not None:
        link = "is a link or a sparse file: repack it with tar --hard-dereference"
        found.incomplete.append(f"{path}:{name} {'is there twice: keep one' if twice else link}")
        found.in_doubt.add(key)
        return
    suffix = f".{suffix.lower()}"
    if suffix in IMAGE_SUFFIXES:
        column = column or PICTURE
        found.samples.setdefault(key, {})[column] = Member(str(path.absolute()), name, info.offset_data, info.size)
        found.pictures[column] = None
    elif suffix in (".txt", ".json"):
        try:
            _add_texts(tar, info, match[2], found.samples.setdefault(key, {}))
        except (ValueError, UserError) as error:
            found.incomplete.append(f"{path}:{name} cannot be read: {reason(error)}")
            found.in_doubt.add(key)
    else:
        found.unread.setdefault(key, f"{path}:{name}")


def _add_texts(tar: tarfile.TarFile, info: tarfile.TarInfo, column: str, sample: dict[str, Any]) -> None:
    """Add the captions of X.txt, or else of X.json, and the other texts of that; raises where it holds none."""
    member = tar.extractfile(info)
    content = "" if member is None else member.read().decode("utf-8-sig")
    if not column.lower().endswith("json"):
        sample[column] = list(lines_of(content))
        return
    if prompts := json_prompts(content, info.name):
        sample.setdefault(CAPTIONS if column == "json" else column, list(prompts))
    value = json.loads(content)
    for key, one in value.items() if isinstance(value, dict) else ():
        if is_text(one):
            sample.setdefault(key, one)
