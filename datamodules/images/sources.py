"""Find the samples of roots, in whichever form a root holds them: pairs, and images with captions."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing, without_credentials
from datamodules.images.data_sets import ARROW_SUFFIXES, HUB, hub_table, local_table, mark_of_data_set
from datamodules.images.folders import (
    CONTROL_FOLDERS,
    FORMATS,
    REJECTED_FOLDERS,
    TARGET_FOLDERS,
    Listing,
    controls_folders,
    endings_of,
    first_folder,
    is_clutter,
    is_image,
    note_unread,
    samples_by_name,
)
from datamodules.images.samples import Found, Root, Sample, scan_roots
from datamodules.images.tables import TABLES, Table, file_table, samples_of
from datamodules.images.tars import is_tar, named_tars, tar_table, tars_of

# Depth to which a data set is searched below a root.
DEEPEST = 4
# Reads the table or the samples of a folder.
Reader = Callable[[], Any]


def find_samples(roots: Iterable[Root]) -> Found:
    """Return the pairs of all roots in order; within a root by name, or in the order of its table.

    Raises:
        UserError: a root does not exist, holds no pairs, or has a table that cannot be used.
    """
    return scan_roots(roots, _pairs)


def find_captioned(roots: Iterable[Root], instance_prompt: str | None) -> Found:
    """Return images with captions: those in folders and their subfolders, or of tables, data sets and tars.

    Args:
        instance_prompt: caption of images without one; None for the empty caption.

    Raises:
        UserError: a root does not exist, holds no images, or is a set of pairs.
    """

    def scan(root: Root) -> Found:
        found = _captioned(root)
        if not root.require_prompt:
            return found
        prompts = (instance_prompt or "",)
        return replace(found, samples=[one if one.prompts else replace(one, prompts=prompts) for one in found.samples])

    return scan_roots(roots, scan)


def _pairs(root: Root) -> Found:
    if (table := _named_table(root)) is not None:
        return samples_of(table, root)
    path = Path(root.path).expanduser()
    if (read := _search(path, partial(_pairs_of, root=root))) is not None:
        return read()
    images = any(is_image(name) and not is_clutter(name) for name in os.listdir(path))
    if images and root.pair_suffixes is not None:
        control, target = root.pair_suffixes
        raise UserError(f"data.root={path}: no pairs named X{control} and X{target} among its images")
    if first_folder(path, TARGET_FOLDERS) is not None or images:
        raise UserError(
            f"data.root={path}: images, but no condition images in {'/'.join(CONTROL_FOLDERS)}, which editing needs. "
            "To train on images and captions: model=flux_dev data=captions"
        )
    raise UserError(
        f"data.root={path}: no pairs found. Looked for {' or '.join(TABLES)}, for folders {'/'.join(TARGET_FOLDERS)} "
        f"(X.png and X.txt) and {'/'.join(CONTROL_FOLDERS)} (X.png), and for the other forms of docs/data.md"
    )


def _pairs_of(folder: Path, root: Root) -> Callable[[], Found] | None:
    """Return a function that reads the pairs of a folder; None if it holds none.

    Raises:
        UserError: two forms are equally likely.
    """
    read = _metadata_of(folder)
    if read is None:
        targets, controls = first_folder(folder, TARGET_FOLDERS), controls_folders(folder)
        if targets is not None and controls:
            return partial(_paired_folders, folder, targets, controls, root)
        endings, read = endings_of(folder, root.pair_suffixes), _stored_table_of(folder, root)
        if endings is not None and read is not None and root.pair_suffixes is None:
            other = next(iter(tars_of(folder)), None) or mark_of_data_set(folder)
            raise UserError(
                f"data.root={folder}: pairs named X{endings[0]}, X{endings[1]}, and {other}: move one elsewhere, or "
                f"set data.pair_suffixes=[{','.join(endings)}] to read the pairs"
            )
        if endings is not None:
            return partial(_paired_names, folder, endings, root)
    return None if read is None else lambda: note_unread(samples_of(read(), root), folder)


def _paired_folders(folder: Path, targets: Path, controls: list[Path], root: Root) -> Found:
    rejected = first_folder(folder, REJECTED_FOLDERS)
    target, *listed = [Listing.of(one) for one in (targets, *controls)]
    others = None if rejected is None else Listing.of(rejected)
    found = samples_by_name(target, listed, others, root, root.require_prompt)
    if not found.samples and not found.incomplete:
        raise UserError(f"data.root={folder}: no images ({FORMATS}) in {' and '.join(map(str, (targets, *controls)))}")
    return note_unread(found, folder)


def _paired_names(folder: Path, endings: tuple[str, str], root: Root) -> Found:
    controls, targets = Listing.of(folder).halves(*endings)
    found = samples_by_name(targets, [controls], None, root, root.require_prompt)
    return note_unread(replace(found, forms=("pair_suffixes",)), folder)


def _captioned(root: Root) -> Found:
    if (table := _named_table(root)) is not None:
        return samples_of(table, root, edits=False)
    path = Path(root.path).expanduser()
    if controls_folders(path):
        raise UserError(
            f"data.root={path} is a set of pairs, for data=cached and a model that edits; data=captions takes images "
            "alone: give the folder of the targets"
        )
    found = Found([], [])
    read_table = _metadata_of(path)
    if read_table is None:
        found = _images_below(path, root)
        if found.incomplete or any(one.prompts for one in found.samples):
            return note_unread(found, path)
        # Images without captions next to them may have theirs in a table.
        read_table = _search(path, lambda folder: _metadata_of(folder) or _stored_table_of(folder, root))
    if read_table is not None:
        return samples_of(read_table(), root, edits=False)
    if not found.samples:
        raise UserError(f"data.root={path}: no images ({FORMATS}) in it or below")
    return note_unread(found, path)


def _images_below(path: Path, root: Root) -> Found:
    """Return the images in a folder and below it, with their captions and masks."""
    samples: list[Sample] = []
    incomplete: list[str] = []
    seen: set[str] = set()
    clutter = 0
    for place, below, _ in os.walk(path, followlinks=True):
        below[:] = sorted(name for name in below if not is_clutter(name))
        if (real := os.path.realpath(place)) in seen:  # a link to a parent folder
            below.clear()
            continue
        seen.add(real)
        found = samples_by_name(Listing.of(Path(place)), (), None, root, require_prompt=False)
        folder = Path(place).relative_to(path)
        samples += [replace(one, key=str(folder / one.key)) for one in found.samples]
        incomplete += found.incomplete
        clutter += found.passed_over
    return Found(samples, incomplete, clutter)


def _search(root: Path, reader_of: Callable[[Path], Reader | None]) -> Reader | None:
    """Return the reader of `root`, or else of the only folder below it that has one; None if there is none.

    Raises:
        UserError: there are several.
    """
    found: dict[str, Reader] = {}
    for place, below, _ in os.walk(root):
        depth = len(Path(place).relative_to(root).parts)
        below[:] = sorted(name for name in below if not is_clutter(name) and depth < DEEPEST)
        if (reader := reader_of(Path(place))) is not None:
            below.clear()
            found[place] = reader
    if len(found) > 1:
        several = list(found)
        raise UserError(
            f"data.root={root}: it holds {len(found)} data sets, {listing(several)}: name one of them, or several as "
            f"data.root=[{several[0]},{several[1]}]"
        )
    return next(iter(found.values()), None)


def _metadata_of(folder: Path) -> Callable[[], Table] | None:
    """Return a function that reads metadata.csv or metadata.jsonl of a folder; None if it has neither."""
    tables = [folder / name for name in TABLES if os.path.lexists(folder / name)]
    if len(tables) > 1:
        raise UserError(f"data.root={folder}: two tables, {' and '.join(TABLES)}: name one of them as data.root")
    return partial(file_table, tables[0]) if tables else None


def _stored_table_of(folder: Path, root: Root) -> Callable[[], Table] | None:
    """Return a function that reads the tars or the data set of a folder; None if it has neither."""
    if tars := tars_of(folder):
        return partial(tar_table, str(folder), tars, root.caption_per_line)
    return None if mark_of_data_set(folder) is None else partial(local_table, folder, None)


def _named_table(root: Root) -> Table | None:
    """Return the table that a root names; None if it names a folder.

    Raises:
        UserError: it does not exist, or cannot be read.
    """
    name = str(root.path)
    if name.startswith(HUB):
        return hub_table(name)
    if "://" in name:
        raise UserError(
            f"data.root={without_credentials(name)}: images are read from this machine: copy them here first "
            "(data.shards streams encoded ones)"
        )
    path = Path(name).expanduser()
    if is_tar(name) and not path.is_dir():
        return tar_table(name, named_tars(name), root.caption_per_line)
    folder, _, split = str(path).rpartition("#")
    if folder and not path.exists() and Path(folder).is_dir():
        return local_table(Path(folder), split)
    if path.is_file() and path.suffix in (".csv", ".jsonl"):
        return file_table(path)
    if path.is_file() and path.suffix in ARROW_SUFFIXES:
        return local_table(path, None)
    if not path.exists():
        raise UserError(f"data.root={path}: no such folder (looked for {path.absolute()})")
    if not path.is_dir():
        raise UserError(
            f"data.root={path}: neither a folder nor a .csv or .jsonl table, nor a .parquet, .arrow or .tar file"
        )
    return None
