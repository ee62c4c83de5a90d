"""Which tars a root names, and what tells them apart."""

import os
from collections.abc import Sequence
from pathlib import Path

from datamodules.errors import UserError, listing
from datamodules.images.folders import is_clutter

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
