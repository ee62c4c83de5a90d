"""Tars of images as WebDataset writes them: the members of a sample share their name up to the first dot."""

import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import kind_of_file, reason, require_file
from datamodules.images.folders import (
    CAPTION_KEYS,
    FORMATS,
    IMAGE_SUFFIXES,
    captions_of,
    is_clutter,
    parse_json,
    read_captions,
)
from datamodules.images.samples import CAPTION_SUFFIXES, Slice, nfc
from datamodules.images.tables import Table

SUFFIX = ".tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
# Folder and name up to the first dot, and the rest, as in WebDataset.
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)[.]([^/]+)")
# Columns of X.jpg, and of the captions of X.
IMAGE, CAPTIONS = "image", "txt"


def is_tar(name: str) -> bool:
    """Return whether a root is a tar, or several in braces, as `{000..012}.tar`."""
    return name.endswith((SUFFIX, *COMPRESSED))


def tars_of(folder: Path) -> list[Path]:
    """Return the tars of a folder, by name."""
    return sorted(path for path in folder.iterdir() if is_tar(path.name) and not is_clutter(path.name))


def named_tars(root: str) -> list[Path]:
    """Return the tars that a root names, with all alternatives of its braces.

    Raises:
        UserError: a tar does not exist.
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


def tar_table(place: str, tars: Sequence[Path], per_line: bool) -> Table:
    """Return the samples of tars as a table.

    Columns: `source` for X.source.jpg, `image` for X.jpg, `txt` for the captions of X.txt or X.json, and the texts of
    an object in X.json.

    Args:
        per_line: see `read_captions`.

    Raises:
        UserError: a tar is compressed or unreadable, or there are no images.
    """
    scans = [_Scan(tar, per_line) for tar in tars]
    incomplete = [line for scan in scans for line in scan.incomplete]
    if not any(scan.images for scan in scans):
        lines = f": {listing(incomplete)}" if incomplete else ""
        raise UserError(f"data.root={place}: no images ({FORMATS}) in the tar{lines}")
    samples: list[dict[str, Any]] = []
    keys: list[str] = []
    unread: list[str] = []
    for prefix, scan in zip(_prefixes(tars), scans, strict=True):
        samples += scan.whole.values()
        keys += [prefix + key for key in scan.whole]
        for key, names in scan.unread.items():
            if key in scan.whole:
                unread += names
            elif key in scan.texts:
                incomplete.append(f"{names[0]} is none of {FORMATS}")
    return Table(
        place=f"data.root={place}",
        rows=[f"sample {key}" for key in keys],
        columns=list(dict.fromkeys(name for values in samples for name in values)),
        values=lambda name: [values.get(name) for values in samples],
        images=list(dict.fromkeys(name for scan in scans for name in scan.images)),
        keys=keys,
        incomplete=incomplete,
        notes=(f"not read, though named like images that are: {listing(unread)}",) if unread else (),
    )


def _prefixes(tars: Sequence[Path]) -> list[str]:
    """Return a prefix for the keys of each tar: its path below the folder that all have in common."""
    paths = [os.path.abspath(tar) for tar in tars]
    above = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [f"{os.path.relpath(path, above).removesuffix(SUFFIX)}/" if len(tars) > 1 else "" for path in paths]


class _Scan:
    """The members of a tar, read from its headers, except for texts.

    Attributes:
        samples: images by key and column.
        texts: contents of text members by key and name.
        images: columns of images.
        unread: by key, members that are neither images nor texts.
        incomplete: a line about a tar that ends early, and about each ambiguous member.
        in_doubt: keys of samples with an ambiguous member.
        whole: the columns of each sample that has an image and is not in doubt.
    """

    def __init__(self, path: Path, per_line: bool) -> None:
        self.path, self.per_line = path, per_line
        self.place, self.tar = str(path.absolute()), os.path.realpath(path)
        self.samples: dict[str, dict[str, Slice]] = defaultdict(dict)
        self.texts: dict[str, dict[str, str]] = defaultdict(dict)
        self.images: dict[str, None] = {}
        self.unread: dict[str, list[str]] = defaultdict(list)
        self.incomplete: list[str] = []
        self.in_doubt: set[str] = set()
        try:
            require_file(path)
            with tarfile.open(path, "r:") as tar:
                self._read(tar, path.stat().st_size)
        except tarfile.ReadError as error:
            if kind_of_file(path) == "a compressed archive":
                raise UserError(
                    f"{path} is compressed, and images are read in place: unpack it, or repack it as a plain .tar "
                    "(gunzip, unxz, zstd -d)"
                ) from error
            raise UserError(f"{path} is empty or no tar ({reason(error)}): copy it again") from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {reason(error)}") from error
        self.whole = self._whole()

    def _whole(self) -> dict[str, dict[str, Any]]:
        """Return the columns of each sample that has an image and no ambiguous member."""
        found = {}
        for key, images in self.samples.items():
            try:
                values = images | self._columns(self.texts.get(key, {}), images)
            except UserError as error:
                self._doubt(key, str(error))
            if key not in self.in_doubt:
                found[key] = values
        return found

    def _columns(self, texts: dict[str, str], images: dict[str, Slice]) -> dict[str, Any]:
        """Return the columns of a sample's texts."""
        found: dict[str, Any] = {}
        captions: dict[str, dict[str, str]] = defaultdict(dict)
        for name, text in texts.items():
            column = Path(name).name.partition(".")[2]
            value = parse_json(text, name) if name.lower().endswith(".json") else None
            if isinstance(value, dict):
                columns = {key: one for key, one in value.items() if key not in images and not isinstance(one, dict)}
                found = {key: one for key, one in columns.items() if captions_of(one) is not None} | found
            if not isinstance(value, dict) or not value.keys().isdisjoint(CAPTION_KEYS):
                captions[column if "." in column else CAPTIONS][name] = text
        return found | {column: list(read_captions(some, self.per_line)[0]) for column, some in captions.items()}

    def _doubt(self, key: str, line: str) -> None:
        self.in_doubt.add(key)
        self.incomplete.append(f"{self.path}:{line}")

    def _read(self, tar: tarfile.TarFile, size: int) -> None:
        """Read all members up to the end of the tar, or to where it is cut."""
        end, last, seen = 0, "its beginning", set()
        try:
            for info in tar:
                blocks = -(-info.size // tarfile.BLOCKSIZE) if info.isreg() else 0
                end = info.offset_data + blocks * tarfile.BLOCKSIZE
                if end > size or info.size < 0:
                    break
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                if not info.isdir():
                    self._add(tar, info, twice=info.name in seen)
                seen.add(info.name)
                last = info.name
        except tarfile.ReadError:
            end = size
        with self.path.open("rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # every tar ends with two empty blocks
                self.incomplete.append(
                    f"{self.path} ends early, or is damaged after {last}: copy it again, the rest is missing"
                )

    def _add(self, tar: tarfile.TarFile, info: tarfile.TarInfo, twice: bool) -> None:
        """Add a member to its sample; `twice` if an earlier member has the same name."""
        name = info.name.removeprefix("./")
        if any(map(is_clutter, name.split("/"))) or (match := _MEMBER.fullmatch(name)) is None:
            return
        key, (column, _, suffix) = nfc(match[1]), match[2].rpartition(".")
        if twice or not info.isreg() or info.sparse is not None:
            link = "is a link or a sparse file: repack it with tar --hard-dereference"
            self._doubt(key, f"{name} {'is there twice: keep one' if twice else link}")
        elif f".{suffix.lower()}" in IMAGE_SUFFIXES:
            column = column or IMAGE
            if before := self.samples[key].get(column):
                self._doubt(key, f"{name} and {before} are both its {column}: keep one")
            self.samples[key][column] = Slice(f"{self.place}:{name}", self.tar, info.offset_data, info.size)
            self.images[column] = None
        elif f".{suffix.lower()}" in CAPTION_SUFFIXES:
            member = tar.extractfile(info)
            try:
                self.texts[key][name] = "" if member is None else member.read().decode("utf-8-sig")
            except ValueError as error:
                self._doubt(key, f"{name} cannot be read: {reason(error)}")
        else:
            self.unread[key].append(f"{self.path}:{name}")
