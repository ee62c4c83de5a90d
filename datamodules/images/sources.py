"""A data source of pairs, in whichever form a root holds them."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from datamodules.errors import UserError
from datamodules.images.folders import (
    CONTROL_FOLDERS,
    FORMATS,
    TARGET_FOLDERS,
    folder_images,
    folders_of_pairs,
    rejected_folder,
    targets_folder,
)
from datamodules.images.forms import Form, form_of_pairs, look_below
from datamodules.images.paired_folders import pairs_of_folders
from datamodules.images.rows import samples_of
from datamodules.images.sample import Found, Root, scan_roots
from datamodules.images.stored_tables import folder_table, named_table
from datamodules.images.suffix_pairs import USUAL, pairs_by_suffix, suffixes_of
from datamodules.images.tables import TABLES


def find_samples(roots: Iterable[Root]) -> Found:
    """The samples of all roots in order; within a root they are sorted by name, or in the order of the table.

    Raises:
        UserError: a root does not exist, holds no pairs, or has a table that cannot be used.
    """
    return scan_roots(roots, _scan)


def _scan(root: Root) -> Found:
    if (named := named_table(str(root.path))) is not None:
        table, passed_over = named
        return replace(samples_of(table, root), passed_over=passed_over)
    path = Path(root.path).expanduser()
    suffixes = root.pair_suffixes
    form = form_of_pairs(path, suffixes)
    if form is not None:
        return _read(path, form, root, suffixes)
    if below := look_below(path, partial(form_of_pairs, suffixes=suffixes)):
        return _read(*below, root, suffixes)
    pictures = folder_images(path)
    if pictures and suffixes is not None:
        raise UserError(f"data.root={path}: no pairs named X{suffixes[0]} and X{suffixes[1]} among its pictures")
    if targets_folder(path) is not None or pictures:
        raise UserError(
            f"data.root={path}: pictures, but no condition images in {'/'.join(CONTROL_FOLDERS)}, which editing "
            "needs. To train on pictures and captions: model=flux_dev data=captions"
        )
    raise UserError(
        f"data.root={path}: no pairs found. Looked for {' or '.join(TABLES)}, for a folder "
        f"{'/'.join(TARGET_FOLDERS)} (X.png and X.txt) beside a folder {'/'.join(CONTROL_FOLDERS)} (X.png), and for "
        "the other forms of docs/data.md"
    )


def _read(folder: Path, form: Form, root: Root, suffixes: tuple[str, str] | None) -> Found:
    """The samples of a folder in one of the forms."""
    if form == "suffixes":
        return pairs_by_suffix(folder, *(suffixes_of(folder, suffixes) or USUAL[0]), root.require_prompt)
    if form != "folders":
        table, passed_over = folder_table(folder, form)
        return replace(samples_of(table, root), passed_over=passed_over)
    targets, controls = folders_of_pairs(folder) or (folder, folder)
    found = pairs_of_folders(targets, controls, rejected_folder(folder), root.require_prompt)
    if not found.samples and not found.incomplete:
        raise UserError(f"data.root={folder}: no images ({FORMATS}) in {targets} and {controls}")
    return found
