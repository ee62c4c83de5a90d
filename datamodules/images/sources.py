"""A data source of pairs, in whichever form a root holds them."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from datamodules.errors import UserError, listing
from datamodules.images.folders import (
    CONTROL_FOLDERS,
    FORMATS,
    FURTHER_CONTROL,
    TARGET_FOLDERS,
    Listing,
    folders_of_pairs,
    rejected_folder,
    targets_folder,
    unread_beside,
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
    pictures = Listing.of(path).images
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
        found = pairs_by_suffix(folder, *(suffixes_of(folder, suffixes) or USUAL[0]), root)
    elif form == "folders" and (places := folders_of_pairs(folder)) is not None:
        found = pairs_of_folders(*places, rejected_folder(folder), root)
        if not found.samples and not found.incomplete:
            names = " and ".join(map(str, (places[0], *places[1])))
            raise UserError(f"data.root={folder}: no images ({FORMATS}) in {names}")
    else:
        table, passed_over = folder_table(folder, form)
        found = replace(samples_of(table, root), passed_over=passed_over)
    return note_unread(found, folder)


def note_unread(found: Found, folder: Path) -> Found:
    """Add notes on files that bear the names of samples and are not read, and on references that begin above 1."""
    places = [(one.target, *one.controls, one.mask, one.rejected) for one in found.samples]
    read = [path for some in places for path in some if isinstance(path, Path)]
    if not read:
        return found
    notes = unread_beside(folder, read, [one.caption_file for one in found.samples if one.caption_file is not None])
    further = [FURTHER_CONTROL.match(two.stem) for _, _, two, *_ in places if isinstance(two, Path)]
    if late := [match[0] for match in further if match and int(match["number"]) != 1]:
        notes.append(f"{folder}: {listing(late)}: second images, for there is no X_control_1")
    return replace(found, notes=(*found.notes, *notes))
