"""Find the samples of roots, in whichever form a root holds them: pairs, and images with captions."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from datamodules.images.data_sets import ARROW_SUFFIXES, HUB, hub_table, local_table, mark_of_data_set
from datamodules.images.folders import (
    CONTROL_FOLDERS,
    IMAGE_FORMATS,
    REJECTED_FOLDER,
    TARGET_FOLDERS,
    Listing,
    controls_folders,
    endings_of,
    first_folder,
    is_clutter,
    is_image,
    leave_out_derived,
    listings_below,
    note_unread,
    samples_by_name,
    with_masks,
)
from datamodules.images.samples import Found, Root
from datamodules.images.tables import PAIRS, TABLES, Table, file_table, samples_of
from datamodules.images.tars import is_tar, named_tars, tar_table, tars_of
from foundation.errors import UserError, count_of, listing, printable, without_credentials
from foundation.files import CONTROL_CHARACTER

# The forms of a root that a setting applies to.
FORMS = {"columns": "tables, data sets and tars, which have columns", "pair_suffixes": "pairs in one folder"}


def find_samples(roots: Iterable[Root]) -> Found:
    """Return the pairs of all roots in order; within a root by name, or in the order of its table.

    Images without a condition image are samples as well, if others have some: captioned images in a root of their own,
    or rows with an empty cell.

    Raises:
        UserError: a root does not exist, or has a table that cannot be used.
    """
    found = _scan(roots := list(roots), _pairs)
    message = (
        f"data.root={listing([str(root.path) for root in roots])}: images, but no condition images in "
        f"{'/'.join(CONTROL_FOLDERS)} or in a table, which editing needs. To make them from the images: "
        "data.control=jpeg, or another recipe of docs/data.md. To train on images and captions: data=captions"
    )
    return replace(found, without_controls=message)


def find_captioned(roots: Iterable[Root], instance_prompt: str | None) -> Found:
    """Return images with captions: those in folders and their subfolders, or of tables, data sets and tars.

    Args:
        instance_prompt: caption of images without one; None for the empty caption.

    Raises:
        UserError: a root does not exist, holds no images, or is a set of pairs.
    """

    def scan(root: Root) -> Found:
        found = _captioned(root, instance_prompt is not None)
        if not root.require_prompt and (root.control is None or instance_prompt is None):
            return found
        prompts = (instance_prompt or "",)
        return replace(found, samples=[one if one.prompts else replace(one, prompts=prompts) for one in found.samples])

    return _scan(list(roots), scan)


def _scan(roots: list[Root], scan: Callable[[Root], Found]) -> Found:
    """Return the samples that `scan` finds in all roots, with unique and printable keys.

    Raises:
        UserError: data.columns or data.pair_suffixes is set for a root that it does not apply to.
    """
    total = Found([], [])
    seen: Counter[str] = Counter()
    for index, root in enumerate(roots):
        found = scan(root)
        for setting, what in FORMS.items():
            if getattr(root, setting) and found.form != setting:
                raise UserError(
                    f"data.{setting} is for {what}; {root.path} has another form. Leave it out, or set it for one "
                    f"root, as data.root=[{{path: ROOT, {setting}: ...}}]"
                )
        if (path := Path(root.path).expanduser()).is_dir():
            found = note_unread(found, path, root)
        samples, lines = [], list(map(printable, found.incomplete))
        for sample in found.samples:
            if odd := CONTROL_CHARACTER.search("".join(sample.prompts)):
                lines.append(printable(f"{sample.caption_file or sample.key}: its caption contains {odd[0]!r}"))
                continue
            key = printable(sample.key if len(roots) == 1 else f"{root.path}/{sample.key}")
            seen[key] += 1  # above 1 if a root is listed twice
            samples.append(replace(sample, key=key if seen[key] == 1 else f"{key}#{seen[key]}", root=index))
        notes = tuple(map(printable, found.notes))
        total = total.plus(replace(found, samples=samples, incomplete=lines, notes=notes))
    return total


def _pairs(root: Root) -> Found:
    if (table := _table_of(root)) is not None:
        return samples_of(table, root)
    path = Path(root.path).expanduser()
    targets, controls = first_folder(path, TARGET_FOLDERS), controls_folders(path)
    if targets is not None and controls:
        return _paired_folders(path, targets, controls, root)
    endings = endings_of(path, root.pair_suffixes)
    stored = next(iter(tars_of(path)), None) or mark_of_data_set(path)
    if endings is not None and stored is not None and root.pair_suffixes is None:
        raise UserError(
            f"data.root={path}: pairs named X{endings[0]}, X{endings[1]}, and {stored}: move one elsewhere, or set "
            f"data.pair_suffixes=[{','.join(endings)}] to read the pairs"
        )
    if endings is not None:
        first, second = Listing.of(path).halves(*endings)
        return replace(samples_by_name(with_masks(second, path), [first], None, root), form="pair_suffixes")
    if (table := _stored_table_of(path, root)) is not None:
        return samples_of(table, root)
    images = any(is_image(name) and not is_clutter(name) for name in os.listdir(path))
    if images and root.pair_suffixes is not None:
        control, target = root.pair_suffixes
        raise UserError(f"data.root={path}: no pairs named X{control} and X{target} among its images")
    if targets is not None:
        return _paired_folders(path, targets, [], root)
    if images:
        return _images_below(path, root, all_folders=True)
    raise UserError(
        f"data.root={path}: no pairs found. Looked for {' or '.join(TABLES)}, for folders {'/'.join(TARGET_FOLDERS)} "
        f"(X.png and X.txt) and {'/'.join(CONTROL_FOLDERS)} (X.png), and for the other forms of docs/data.md"
    )


def _paired_folders(folder: Path, targets: Path, controls: list[Path], root: Root) -> Found:
    tops = [targets, *controls]
    trees = [listings_below(top) for top in tops]
    rejects = listings_below(folder / REJECTED_FOLDER) if (folder / REJECTED_FOLDER).is_dir() else {}
    counts = Counter(place for tree in trees for place in tree)
    found = Found([], [])
    for tree in trees:
        leave_out_derived(tree, kept={place for place, count in counts.items() if count > 1})
    for place in sorted({place for tree in (*trees, rejects) for place in tree}):
        target, *listed = [
            tree.get(place) or Listing(top / place, place) for top, tree in zip(tops, trees, strict=True)
        ]
        found = found.plus(samples_by_name(with_masks(target, folder), listed, rejects.get(place), root))
    if not found.samples and not found.incomplete:
        raise UserError(f"data.root={folder}: no images ({IMAGE_FORMATS}) in {' and '.join(map(str, tops))}")
    return found


def _captioned(root: Root, all_folders: bool) -> Found:
    path = Path(root.path).expanduser()
    if path.is_dir() and controls_folders(path):
        raise UserError(f"data.root={path} {PAIRS}: give the folder of the targets")
    if (table := _table_of(root)) is not None:
        return samples_of(table, root, edits=False)
    found = _images_below(path, replace(root, require_prompt=False), all_folders)
    captioned = found.incomplete or any(one.prompts for one in found.samples)
    # Images without captions next to them may have theirs in a stored table.
    if not captioned and (table := _stored_table_of(path, root)) is not None:
        return samples_of(table, root, edits=False)
    if not captioned and not found.samples:
        raise UserError(f"data.root={path}: no images ({IMAGE_FORMATS}) in it or below")
    return found


def _images_below(path: Path, root: Root, all_folders: bool) -> Found:
    """Return the images in a folder and below it, with their captions and masks.

    Args:
        all_folders: also use folders in which no image has a caption, although images of other folders have.
    """
    below = listings_below(path)
    for place in below:
        if place != Path() and any((path / place / name).exists() for name in TABLES):
            raise UserError(f"data.root={path}: {path / place} has a table of its own. Name that folder as data.root")
    leave_out_derived(below)
    found = {place: samples_by_name(one, (), None, root) for place, one in below.items()}
    total = Found([], [])
    bare = {place for place, one in found.items() if one.samples and not any(one.prompts for one in one.samples)}
    captioned = any(one.incomplete or (one.samples and place not in bare) for place, one in found.items())
    for place, one in found.items():
        if captioned and place in bare and not all_folders:
            note = f"{path / place}: {count_of(len(one.samples), 'images')} without captions are left out, since others"
            one = Found([], [], (f"{note} have one. data.source.instance_prompt gives them a caption",))
        total = total.plus(one)
    return total


def _metadata_of(folder: Path) -> Table | None:
    """Return metadata.csv or metadata.jsonl of a folder; None if it has neither."""
    tables = [folder / name for name in TABLES if os.path.lexists(folder / name)]
    if len(tables) > 1:
        raise UserError(f"data.root={folder}: two tables, {' and '.join(TABLES)}: name one of them as data.root")
    return file_table(tables[0]) if tables else None


def _stored_table_of(folder: Path, root: Root) -> Table | None:
    """Return the tars or the data set of a folder; None if it has neither."""
    if tars := tars_of(folder):
        return tar_table(str(folder), tars, root.caption_per_line)
    return None if mark_of_data_set(folder) is None else local_table(folder, None)


def _table_of(root: Root) -> Table | None:
    """Return the table that a root names, or that is the metadata of its folder; None if there is none.

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
    return _metadata_of(path)
