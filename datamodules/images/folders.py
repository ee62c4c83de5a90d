"""Naming rules for folders of images: which files are pictures, further control images and masks."""

import os
import re
from collections.abc import Container
from pathlib import Path

from datamodules.errors import UserError

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
TARGET_FOLDERS = ("training_images", "images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "controls", "condition_images")
REJECTED_FOLDERS = ("rejected_images",)
FORMATS = ", ".join(sorted(IMAGE_SUFFIXES))
# What systems and programs leave beside pictures.
CLUTTER = {"thumbs.db", "desktop.ini", "__macosx"}
FURTHER_CONTROL = re.compile(r"(?P<stem>.+)_control_(?P<number>\d+)$")


def targets_folder(root: Path) -> Path | None:
    """Where a data set of pairs keeps its targets."""
    return _first_folder(root, TARGET_FOLDERS)


def controls_folder(root: Path) -> Path | None:
    """Where a data set of pairs keeps its condition images."""
    return _first_folder(root, CONTROL_FOLDERS)


def rejected_folder(root: Path) -> Path | None:
    """Where a data set of pairs keeps what is to be liked less than its targets."""
    return _first_folder(root, REJECTED_FOLDERS)


def folders_of_pairs(root: Path) -> tuple[Path, Path] | None:
    """Both: of the targets, of the condition images."""
    targets, controls = targets_folder(root), controls_folder(root)
    return None if targets is None or controls is None else (targets, controls)


def _first_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def folder_images(folder: Path) -> dict[str, Path]:
    """The folder's images by stem; raises UserError for two of one stem, which would make a pair ambiguous."""
    images: dict[str, Path] = {}
    for name in sorted(os.listdir(folder)):  # paths take much longer to sort
        if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not is_clutter(name):
            path = folder / name
            if path.stem in images:
                raise UserError(f"{images[path.stem]} and {path}: two images of one name, keep one")
            images[path.stem] = path
    return images


def is_clutter(name: str) -> bool:
    """Whether a file or folder is nobody's picture: hidden (`._x` of macOS, too), or left by a system."""
    return name.startswith(".") or name.lower() in CLUTTER


def count_clutter(folder: Path) -> int:
    """How many files and folders in it are nobody's pictures."""
    return sum(is_clutter(name) for name in os.listdir(folder))


def unread_files(folder: Path) -> dict[str, Path]:
    """By stem, files that are neither images nor captions, but may be pictures in another format."""
    known = {*IMAGE_SUFFIXES, ".txt", ".json"}
    names = sorted(name for name in os.listdir(folder) if os.path.splitext(name)[1].lower() not in known)
    paths = [folder / name for name in names if not is_clutter(name)]
    return {path.stem: path for path in paths if not path.is_dir()}


def none_of_the_formats(path: Path) -> str:
    """The message about a file in an unsupported format."""
    return f"{path} is none of {FORMATS}"


def further_controls(images: dict[str, Path], stem: str) -> list[Path]:
    """`X_control_1.*`, `X_control_2.*`, ... beside `X.*`, by number."""
    numbered = [
        (int(match["number"]), path)
        for name, path in images.items()
        if name.startswith(f"{stem}_control_") and (match := FURTHER_CONTROL.match(name)) and match["stem"] == stem
    ]
    return [path for _, path in sorted(numbered)]


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
