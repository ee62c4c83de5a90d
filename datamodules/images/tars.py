"""Tars of images as WebDataset writes them: the members of a sample share their name up to the first dot."""

import contextlib
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.images.captions import CAPTION_KEYS, captions_of, parsed, read_captions
from datamodules.images.folders import IMAGE_FORMATS, IMAGE_SUFFIXES, is_clutter, unsupported
from datamodules.images.samples import CAPTION_SUFFIXES, Slice, nfc
from datamodules.images.tables import Table
from foundation.errors import UserError, listing
from foundation.files import TEXT, decoded, kind_of_file, reason, require_file

SUFFIX = ".tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
# Folder and name up to the first dot, and the rest, as in WebDataset.
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)[.]([^/]+)")


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
    paths = [os.path.abspath(tar) for tar in tars]
    above = os.path.commonpath([os.path.dirname(path) for path in paths])
    samples: dict[str, dict[str, Any]] = {}
    images: dict[str, None] = {}
    incomplete: list[str] = []
    for tar, path in zip(tars, paths, strict=True):
        scan = _Scan(tar)
        below = Path(os.path.relpath(path, above)).as_posix()
        prefix = f"{below.removesuffix(SUFFIX)}/" if len(tars) > 1 else ""
        samples |= {prefix + key: values for key, values in scan.samples(per_line).items()}
        images |= {column: None for own in scan.images.values() for column in own}
        incomplete += scan.faults.values()
    if not samples:
        lines = f": {listing(incomplete)}" if incomplete else ""
        raise UserError(f"data.root={place}: no usable images ({IMAGE_FORMATS}) in the tar{lines}")
    return Table(
        place=f"data.root={place}",
        rows=[f"sample {key}" for key in samples],
        columns=list(dict.fromkeys(name for values in samples.values() for name in values)),
        values=lambda name: [values.get(name) for values in samples.values()],
        images=list(images),
        keys=list(samples),
        incomplete=incomplete,
    )


class _Scan:
    """The members of a tar, read from its headers, except for texts.

    Attributes:
        images: images by key of their sample and column.
        texts: texts, and the content of JSON files, by key and name.
        faults: a line about each ambiguous sample by its key, and about a tar that ends early.

    Raises:
        UserError: it is compressed or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place, self.file = path, path.absolute(), os.path.realpath(path)
        self.images: dict[str, dict[str, Slice]] = defaultdict(dict)
        self.texts: dict[str, dict[str, Any]] = defaultdict(dict)
        self.faults: dict[str, str] = {}
        self._others: dict[str, str] = {}  # by key a member that is neither
        try:
            require_file(path)
            with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                last = self._read(tar, path.stat().st_size)
                file.seek(tar.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # every tar ends with two empty blocks
                    self.faults[""] = f"{path} ends early, or is damaged after {last}: copy it again"
        except tarfile.ReadError as error:
            if kind_of_file(path) == "a compressed archive":
                raise UserError(
                    f"{path} is compressed, and images are read in place: unpack it, or repack it as a plain .tar "
                    "(gunzip, unxz, zstd -d)"
                ) from error
            raise UserError(f"{path} is empty or no tar ({reason(error)}): copy it again") from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {reason(error)}") from error
        for key in self.texts.keys() & self._others.keys() - self.images.keys():
            self._doubt(key, unsupported(self._others[key]))

    def samples(self, per_line: bool) -> dict[str, dict[str, Any]]:
        """Return the columns of each sample that has an image and is not ambiguous."""
        found = {}
        for key, images in self.images.items():
            try:
                values = _columns(self.texts.get(key, {}), per_line) | images
            except UserError as error:
                self._doubt(key, str(error))
            if key not in self.faults:
                found[key] = values
        return found

    def _doubt(self, key: str, line: str) -> None:
        self.faults.setdefault(key, f"{self.path}:{line}")

    def _read(self, tar: tarfile.TarFile, size: int) -> str:
        """Read all members up to the end of the tar, or to where it is cut; return the name of the last one."""
        last = "its beginning"
        with contextlib.suppress(tarfile.ReadError):
            for info in tar:
                if not 0 <= info.size <= size - info.offset_data:
                    break
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                self._add(tar, info)
                last = info.name
        return last

    def _add(self, tar: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        name = info.name.removeprefix("./")
        match = _MEMBER.fullmatch(name)
        if match is None or info.isdir() or any(map(is_clutter, name.split("/"))):
            return
        key, (column, _, end) = nfc(match[1]), match[2].rpartition(".")
        column, suffix = column or "image", f".{end.lower()}"
        if not info.isreg() or info.sparse is not None:
            self._doubt(key, f"{name} is a link or a sparse file: repack it with tar --hard-dereference")
        elif suffix in IMAGE_SUFFIXES:
            if before := self.images[key].get(column):
                self._doubt(key, f"{name} and {before} are both its {column}: keep one")
            self.images[key][column] = Slice(f"{self.place}:{name}", self.file, info.offset_data, info.size)
        elif suffix in CAPTION_SUFFIXES and info.size > TEXT:
            self._doubt(key, f"{name} has more than {TEXT:,} bytes, the most that are read")
        elif suffix in CAPTION_SUFFIXES:
            if name in self.texts[key]:
                self._doubt(key, f"{name} is there twice: keep one")
            member = tar.extractfile(info)
            try:
                self.texts[key][name] = parsed(decoded(b"" if member is None else member.read(), name), name)
            except (ValueError, UserError) as error:
                self._doubt(key, reason(error))
        else:
            self._others[key] = name


def _columns(texts: dict[str, Any], per_line: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    captions: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in texts.items():
        column = Path(name).name.partition(".")[2]
        if isinstance(value, dict):
            fields = {key: one for key, one in value.items() if not isinstance(one, dict)}
            found = {key: one for key, one in fields.items() if captions_of(one) is not None} | found
        if not isinstance(value, dict) or not value.keys().isdisjoint(CAPTION_KEYS):
            captions[column if "." in column else "txt"][name] = value
    return found | {column: list(read_captions(some, per_line)[0]) for column, some in captions.items()}
