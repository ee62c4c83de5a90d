"""Which tars a root names, and what tells them apart."""

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
from datamodules.images.samples import CAPTION_SUFFIXES, KEYS, TextFile, is_text, json_prompts, nfc
from datamodules.images.tables import Table

SUFFIX = ".tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")


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


def prefixes_of(tars: Sequence[Path]) -> list[str]:
    """What stands before the keys of each tar: its name, and what else tells it from one of the same name."""
    if len(tars) == 1:
        return [""]
    if len({tar.stem for tar in tars}) == len(tars):
        return [f"{tar.stem}/" for tar in tars]
    paths = [os.path.abspath(tar) for tar in tars]
    above = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [f"{os.path.relpath(path, above).removesuffix(SUFFIX)}/" for path in paths]


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
        place: the tar, as messages call it.
        tar: its one name, behind all links.
        name: its name in there.
        offset, size: in bytes.
    """

    place: str = field(compare=False)
    tar: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise EOFError(f"{self.place} ends early")
        return content

    def signature(self) -> tuple[str, int, int, int]:
        stat = os.stat(self.tar)
        return f"{self.tar}#{self.offset}.{self.name}", stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

    @property
    def stem(self) -> str:
        return Path(self.name).name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"


@dataclass
class _Scan:
    """What a tar holds.

    Attributes:
        path: the tar; `place` and `tar` as in a `Member`.
        samples: by key, the values by column.
        pictures: the columns of pictures.
        unread: by key, members that are neither pictures nor texts, but may be pictures in another format.
        incomplete: a line about a tar that ends early, and each member that is in doubt.
        in_doubt: the keys of samples with such a member.
        passed_over: how many members are no pictures of anybody.
    """

    path: Path
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    pictures: dict[str, None] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    in_doubt: set[str] = field(default_factory=set)
    passed_over: int = 0

    def __post_init__(self) -> None:
        self.place, self.tar = str(self.path.absolute()), os.path.realpath(self.path)

    def whole(self) -> dict[str, dict[str, Any]]:
        """The samples but those in doubt; a text without a picture is none."""
        return {
            key: values
            for key, values in self.samples.items()
            if key not in self.in_doubt and any(isinstance(value, Member) for value in values.values())
        }


def tar_table(place: str, tars: Sequence[Path]) -> tuple[Table, int]:
    """The samples of tars as a table, and how many members were passed over.

    Its columns: `source` for X.source.jpg, `image` for X.jpg, `txt` for the captions of X.txt or else X.json,
    and those of the object in X.json.

    Raises:
        UserError: a tar is compressed or none, or there are no pictures.
    """
    scans = [_scan(tar) for tar in tars]
    incomplete = [line for found in scans for line in found.incomplete]
    pictures = dict.fromkeys(name for found in scans for name in found.pictures)
    if not pictures:
        lines = f": {listing(incomplete)}" if incomplete else ""
        raise UserError(f"data.root={place}: no pictures ({FORMATS}) in the tar{lines}")
    whole = [found.whole() for found in scans]
    samples = [values for some in whole for values in some.values()]
    keys = [f"{name}{key}" for name, some in zip(prefixes_of(tars), whole, strict=True) for key in some]
    for found, some in zip(scans, whole, strict=True):
        lost = [key for key in found.unread if key in found.samples and key not in some]
        incomplete += [f"{found.unread[key][0]} is none of {FORMATS}" for key in lost]
    unread = [name for found in scans for key, names in found.unread.items() if key in found.samples for name in names]
    return Table(
        place=f"data.root={place}",
        rows=[f"sample {key}" for key in keys],
        columns=list(dict.fromkeys(name for values in samples for name in values)),
        values=lambda name: [values.get(name) for values in samples],
        pictures=list(pictures),
        keys=keys,
        incomplete=tuple(incomplete),
        notes=(f"not read, though named like images that are: {listing(unread)}",) if unread else (),
    ), sum(found.passed_over for found in scans)


def _scan(path: Path) -> _Scan:
    """The samples of a tar, from its headers alone but for texts."""
    found = _Scan(path)
    try:
        require_file(path)
        size = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            _add_members(tar, size, found)
    except tarfile.ReadError as error:
        if path.name.endswith(COMPRESSED) or _is_compressed(path):
            raise UserError(
                f"{path} is compressed, and pictures are read from where they stand: unpack it, or repack it as a "
                "plain .tar (gunzip, unxz, zstd -d)"
            ) from error
        raise UserError(f"{path} is empty or no tar ({reason(error)}): copy it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    return found


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd"))


def _add_members(tar: tarfile.TarFile, size: int, found: _Scan) -> None:
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
                _add(tar, info, found, twice=info.name in seen)
            seen.add(info.name)
            last = info.name
    except tarfile.ReadError:
        end = size
    with found.path.open("rb") as file:
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # every tar ends with two empty blocks
            found.incomplete.append(
                f"{found.path} ends early, or is damaged behind {last}: copy it again, the rest is missing"
            )


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, found: _Scan, twice: bool) -> None:
    """Add a member to its sample; `twice`: whether there was one of that name before."""
    name = info.name.removeprefix("./")
    if any(is_clutter(part) for part in name.split("/")):
        found.passed_over += 1
        return
    if (match := _MEMBER.fullmatch(name)) is None:
        return
    key, (column, _, suffix) = nfc(match[1]), match[2].rpartition(".")
    if twice or not info.isreg() or info.sparse is not None:
        link = "is a link or a sparse file: repack it with tar --hard-dereference"
        found.incomplete.append(f"{found.path}:{name} {'is there twice: keep one' if twice else link}")
        found.in_doubt.add(key)
        return
    suffix = f".{suffix.lower()}"
    if suffix in IMAGE_SUFFIXES:
        column, sample = column or PICTURE, found.samples.setdefault(key, {})
        if isinstance(before := sample.get(column), Member):
            found.incomplete.append(f"{found.path}:{name} and {before.name} are both its {column}: keep one")
            found.in_doubt.add(key)
        sample[column] = Member(found.place, found.tar, name, info.offset_data, info.size)
        found.pictures[column] = None
    elif suffix in CAPTION_SUFFIXES:
        column = match[2] if column else suffix[1:].replace("caption", CAPTIONS)
        try:
            _add_texts(tar, info, column, found.samples.setdefault(key, {}))
        except (ValueError, UserError) as error:
            found.incomplete.append(f"{found.path}:{name} cannot be read: {reason(error)}")
            found.in_doubt.add(key)
    else:
        found.unread.setdefault(key, []).append(f"{found.path}:{name}")


def _add_texts(tar: tarfile.TarFile, info: tarfile.TarInfo, column: str, sample: dict[str, Any]) -> None:
    """Add the captions of X.txt or X.json, and the other texts of that; raise where two members differ."""
    member = tar.extractfile(info)
    content = "" if member is None else member.read().decode("utf-8-sig")
    is_json = column.lower().endswith("json")
    prompts = list(json_prompts(content, info.name)) if is_json else TextFile(content)
    value = json.loads(content) if is_json else None
    if column == "json" and not (isinstance(value, dict) and value.keys().isdisjoint(KEYS)):
        column = CAPTIONS  # else the object itself is the caption, where there is no other
    if prompts or not is_json:
        before = sample.get(column, prompts)
        if len({tuple(" ".join([one] if isinstance(one, str) else one).split()) for one in (before, prompts)}) > 1:
            raise ValueError("another member has a different caption. Keep one")
        sample[column] = before if is_json else prompts
    for key, one in value.items() if isinstance(value, dict) else ():
        if is_text(one):
            sample.setdefault(key, one)
