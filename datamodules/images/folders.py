"""Naming rules for folders of images: which files are images, captions, further control images and masks."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from datamodules.errors import UserError, listing

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
# In any case, as .TXT; the first is where captions are written.
CAPTION_SUFFIXES = (".txt", ".caption", ".json")
TARGET_FOLDERS = ("training_images", "images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "controls", "condition_images")
REJECTED_FOLDERS = ("rejected_images",)
FORMATS = ", ".join(sorted(IMAGE_SUFFIXES))
# What systems and programs leave beside pictures.
CLUTTER = {"thumbs.db", "desktop.ini", "__macosx"}
FURTHER_CONTROL = re.compile(r"(?P<stem>.+)_control_(?P<number>\d+)$")
_NUMBERED_FOLDER = re.compile(rf"({'|'.join(CONTROL_FOLDERS)})[_-]?(\d+)")
# Folders below a data set that are searched for files that nothing reads.
SEARCHED = 2


def nfc(name: str) -> str:
    """Return the name in composed Unicode: a Mac may write accents as characters of their own."""
    return unicodedata.normalize("NFC", name)


def stem_of(path: Path) -> str:
    """Return the file's name without suffix, as names are compared."""
    return nfc(path.stem)


def find_file(folder: Path, name: str) -> Path:
    """Return the path of a name below a folder, in whichever Unicode form the disk has it."""
    path = folder / name
    if name.isascii() or os.path.lexists(path):
        return path
    for part in Path(name).parts:
        there = _names(folder, folder.stat().st_mtime_ns) if folder.is_dir() else {}
        folder /= there.get(nfc(part), part)
    return folder


@lru_cache(maxsize=64)
def _names(folder: Path, changed: int) -> dict[str, str]:
    """Return the names in a folder, which was changed at a time, by their composed form."""
    return {nfc(name): name for name in os.listdir(folder)}


def targets_folder(root: Path) -> Path | None:
    """Where a data set of pairs keeps its targets."""
    return _first_folder(root, TARGET_FOLDERS)


def controls_folders(root: Path) -> list[Path]:
    """Return the folders of a data set's condition images: `control`, then `control_1`, `control_2`, ... by number.

    Raises:
        UserError: two folders have the same number.
    """
    first = _first_folder(root, CONTROL_FOLDERS)
    found = {} if first is None else {-1: first}
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        if (match := _NUMBERED_FOLDER.fullmatch(name)) and (root / name).is_dir():
            number = int(match[2])
            if number in found:
                raise UserError(f"data.root={root}: {found[number].name} and {name} have the same number. Rename one")
            found[number] = root / name
    return [found[number] for number in sorted(found)]


def rejected_folder(root: Path) -> Path | None:
    """Where a data set of pairs keeps what is to be liked less than its targets."""
    return _first_folder(root, REJECTED_FOLDERS)


def folders_of_pairs(root: Path) -> tuple[Path, list[Path]] | None:
    """Return the folder of the targets and those of the condition images; None if one of them is missing."""
    targets, controls = targets_folder(root), controls_folders(root)
    return (targets, controls) if targets is not None and controls else None


def _first_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


@dataclass(frozen=True)
class Listing:
    """The files of a folder by `stem_of`.

    Attributes:
        texts: the files that may hold captions.
        others: files that are neither, but may be images in another format.
        clutter: the number of files and folders that a system has left.
    """

    images: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, list[Path]] = field(default_factory=dict)
    others: dict[str, list[Path]] = field(default_factory=dict)
    clutter: int = 0

    @classmethod
    def of(cls, folder: Path) -> "Listing":
        """List a folder; raise UserError for two images of one stem, which would make a pair ambiguous."""
        names = os.listdir(folder)
        found = cls(clutter=sum(map(is_clutter, names)))
        for name in sorted(names):  # paths take much longer to sort
            path = folder / name
            stem, suffix = stem_of(path), path.suffix.lower()
            if is_clutter(name):
                continue
            if suffix in IMAGE_SUFFIXES:
                if stem in found.images:
                    raise UserError(f"{found.images[stem]} and {path}: two images of one name, keep one")
                found.images[stem] = path
            elif suffix in CAPTION_SUFFIXES:
                found.texts.setdefault(stem, []).append(path)
            elif not path.is_dir():
                found.others.setdefault(stem, []).append(path)
        return found


def is_clutter(name: str) -> bool:
    """Whether a file or folder is nobody's picture: hidden (`._x` of macOS, too), or left by a system."""
    return name.startswith(".") or name.lower() in CLUTTER


def none_of_the_formats(path: Path) -> str:
    """The message about a file in an unsupported format."""
    return f"{path} is none of {FORMATS}"


def no_caption(target: Path, wanted: Path, listings: Iterable[Listing]) -> str:
    """Return the message about a missing caption, which names the files that are there instead."""
    names = dict.fromkeys([stem_of(wanted), stem_of(target)])
    kinds = [kind for one in listings for kind in (one.texts, one.others)]
    there = [str(path) for kind in kinds for stem in names for path in kind.get(stem, [])]
    return f"{target} has no caption {wanted}" + (f" (there is {listing(there)})" if there else "")


def further_controls(images: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Return by stem X the images `X_control_1.*`, `X_control_2.*`, ..., by number."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for name, path in images.items():
        if match := FURTHER_CONTROL.match(name):
            found.setdefault(match["stem"], []).append((int(match["number"]), path))
    return {stem: [path for _, path in sorted(paths)] for stem, paths in found.items()}


def primary_images(images: dict[str, Path]) -> dict[str, Path]:
    """Those of a folder's images, by stem, that are no further controls and masks of others."""
    return {stem: path for stem, path in images.items() if not belongs_to_another(stem, images)}


def belongs_to_another(stem: str, stems: Container[str]) -> bool:
    """Whether an image is a further control or the mask of one of `stems`."""
    match = FURTHER_CONTROL.match(stem)
    return (match is not None and match["stem"] in stems) or is_mask(stem, stems)


def is_mask(stem: str, stems: Container[str]) -> bool:
    """Whether an image is the mask of one of `stems`."""
    return stem.endswith("_mask") and stem.removesuffix("_mask") in stems


def unread_beside(root: Path, read: Iterable[Path], captions: Iterable[Path]) -> list[str]:
    """Return a note on the files in and below a folder that bear the name of an image that is read, but are not read.

    Args:
        read: the images.
        captions: one caption file of each, whose suffix may be any.
    """
    known = {str(path) for path in read}
    stems = {stem_of(Path(name)) for name in known}
    texts = {nfc(str(path.parent / path.stem)) for path in captions}
    kinds: Counter[str] = Counter()
    for place, below, names in os.walk(root):
        depth = len(Path(place).relative_to(root).parts)
        inside = str(Path(place, "_"))[:-1]  # as paths are written, without ./
        below[:] = [name for name in below if depth < SEARCHED and not is_clutter(name)]
        for name in names:
            stem, suffix = os.path.splitext(name)
            plain = nfc(stem)
            if is_clutter(name) or not (plain in stems or belongs_to_another(plain, stems)):
                continue
            is_text = suffix.lower() in CAPTION_SUFFIXES and nfc(inside + stem) in texts
            if not is_text and inside + name not in known:
                kinds[os.path.relpath(f"{inside}*{suffix}", root)] += 1
    named = listing([f"{kind} ({count})" for kind, count in kinds.items()])
    return [f"{root}: not read, though named like images that are: {named}"] if kinds else []
