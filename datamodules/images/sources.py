"""In which form a folder holds its data set, and where below it stands."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from datamodules.errors import UserError, listing, without_credentials
from datamodules.images.data_sets import HUB, SUFFIXES, hub_table, local_table, mark_of_data_set
from datamodules.images.folders import (
    CONTROL_FOLDERS,
    FORMATS,
    FURTHER_CONTROL,
    TARGET_FOLDERS,
    USUAL,
    Listing,
    controls_folders,
    folders_of_pairs,
    is_clutter,
    is_mask,
    none_of_the_formats,
    pairs_by_suffix,
    pairs_of_folders,
    rejected_folder,
    suffixes_of,
    targets_folder,
    unread_beside,
)
from datamodules.images.samples import Found, Root, Sample, read_prompts, scan_roots
from datamodules.images.tables import TABLES, Table, file_table, samples_of
from datamodules.images.tars import is_tar, named_tars, tar_table, tars_of

Form = Literal["table", "folders", "tars", "data set", "suffixes"]
# Folders below folders in which a data set is looked for.
DEEPEST = 4


def form_of_pairs(folder: Path, suffixes: tuple[str, str] | None) -> Form | None:
    """How a folder holds pairs; None if it holds none.

    Args:
        suffixes: of pairs in one folder, where they are named: these pairs are meant, whatever is beside them.

    Raises:
        UserError: two forms are as likely.
    """
    form = form_of_table(folder)
    if form == "table":
        return form
    if folders_of_pairs(folder) is not None:
        return "folders"
    ends = suffixes_of(folder, suffixes)
    if form is None or ends is None or suffixes is not None:
        return form if ends is None else "suffixes"
    other = next(iter(tars_of(folder)), None) or mark_of_data_set(folder)
    raise UserError(
        f"data.root={folder}: pairs named X{ends[0]}, X{ends[1]}, and {other}: move one of them elsewhere, or say "
        f"data.pair_suffixes=[{','.join(ends)}] for the pairs, data.root={other} for the other"
    )


def form_of_table(folder: Path) -> Form | None:
    """How a folder holds a table, for pairs or pictures with captions; None if it holds none."""
    if any(os.path.lexists(folder / name) for name in TABLES):
        return "table"
    if tars_of(folder):
        return "tars"
    return None if mark_of_data_set(folder) is None else "data set"


def look_below(root: Path, form_of: Callable[[Path], Form | None]) -> tuple[Path, Form] | None:
    """The only folder below that holds a data set, and its form; None if there is none.

    Raises:
        UserError: there are several.
    """
    found: list[tuple[Path, Form]] = []
    for place, below, _ in os.walk(root):
        folder = Path(place)
        depth = len(folder.relative_to(root).parts)
        below[:] = sorted(name for name in below if not is_clutter(name) and depth < DEEPEST)
        if folder != root and (form := form_of(folder)) is not None:
            below.clear()
            found.append((folder, form))
    if len(found) > 1:
        several = [str(folder) for folder, _ in found]
        raise UserError(
            f"data.root={root}: it holds {len(found)} data sets, {listing(several)}: name one of them, or several as "
            f"data.root=[{several[0]},{several[1]}]"
        )
    return found[0] if found else None


def named_table(root: str) -> tuple[Table, int] | None:
    """The table that a root names, and how many files were passed over; None where it names a folder.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    if root.startswith(HUB):
        return hub_table(root), 0
    if "://" in root:
        raise UserError(
            f"data.root={without_credentials(root)}: pictures are read from this machine: copy them here first "
            "(data.shards streams what is already encoded)"
        )
    path = Path(root).expanduser()
    split: str | None = None
    if is_tar(root) and not path.is_dir():
        return tar_table(root, named_tars(root))
    name, _, of_folder = str(path).rpartition("#")
    if name and not path.exists() and Path(name).is_dir():
        path, split = Path(name), of_folder
    if path.is_file() and path.suffix in (".csv", ".jsonl"):
        return file_table(path), 0
    if split is not None or (path.is_file() and path.suffix in SUFFIXES):
        return local_table(path, split), 0
    if not path.exists():
        raise UserError(f"data.root={path}: no such folder (looked for {path.absolute()})")
    if not path.is_dir():
        raise UserError(
            f"data.root={path}: neither a folder nor a .csv or .jsonl table, nor a .parquet, .arrow or .tar file"
        )
    return None


def folder_table(folder: Path, form: Form) -> tuple[Table, int]:
    """The table that a folder holds in a form, and how many files were passed over.

    Raises:
        UserError: it has two of our tables, or cannot be read.
    """
    if form == "tars":
        passed_over = sum(is_clutter(name) for name in os.listdir(folder))
        table, members = tar_table(str(folder), tars_of(folder))
        return table, passed_over + members
    if form == "data set":
        return local_table(folder, None), 0
    tables = [folder / name for name in TABLES if os.path.lexists(folder / name)]
    if len(tables) > 1:
        raise UserError(f"data.root={folder}: two tables, {' and '.join(TABLES)}: name one of them as data.root")
    return file_table(tables[0]), 0


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


# How scripts of kohya-ss name a folder of images: repeats and what they show. Years are none.
KOHYA = re.compile(r"([2-9]|[1-9]\d{1,2})_\S")


def find_captioned(roots: Iterable[Root], instance_prompt: str | None) -> Found:
    """Every `X.png` (.jpg, ...) in the folders and their subfolders, with caption `X.txt` and loss mask `X_mask.*`.

    Or the rows of a table, a data set of Hugging Face, or tars.

    Args:
        instance_prompt: the caption of pictures without one; None for the empty caption.

    Raises:
        UserError: a root does not exist, holds no pictures, or is a set of pairs.
    """
    return scan_roots(
        roots, lambda root: _scan_captioned(root, (instance_prompt or "",) if root.require_prompt else ())
    )


def _scan_captioned(root: Root, instance_prompts: tuple[str, ...]) -> Found:
    def read(table: Table, passed_over: int) -> Found:
        return replace(samples_of(table, root, instance_prompts, edits=False), passed_over=passed_over)

    if (named := named_table(str(root.path))) is not None:
        return read(*named)
    path = Path(root.path).expanduser()
    if controls_folders(path):
        raise UserError(
            f"data.root={path} is a set of pairs, for data=cached and a model that edits; data=captions takes pictures "
            "alone: give the folder of the targets"
        )
    if (form := form_of_table(path)) == "table":
        return read(*folder_table(path, form))
    found, captioned = _pictures(path, instance_prompts, root)
    if captioned or found.incomplete:
        return note_unread(found, path)
    if found.samples:  # without captions beside them: they may stand in a table
        below = look_below(path, lambda folder: "table" if form_of_table(folder) == "table" else None)
    else:
        below = (path, form) if form is not None else look_below(path, form_of_table)
    if below is not None:
        return read(*folder_table(*below))
    if not found.samples:
        raise UserError(f"data.root={path}: no pictures ({FORMATS}) in it or below")
    return note_unread(found, path)


def _pictures(root: Path, instance_prompts: tuple[str, ...], settings: Root) -> tuple[Found, bool]:
    """The pictures of a folder and of those below, and whether any has a caption beside it."""
    samples: list[Sample] = []
    unread: list[str] = []
    seen: set[str] = set()
    # By folder the number of images, and how many of them have captions.
    counts: dict[Path, tuple[int, int]] = {}
    passed_over = 0
    for place, below, _ in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not is_clutter(name))
        folder = Path(place)
        if (real := os.path.realpath(folder)) in seen:  # a link to a parent folder
            below.clear()
            continue
        seen.add(real)
        listed = Listing.of(folder)
        passed_over += listed.clutter
        count = captioned = 0
        for stem, path in listed.images.items():
            if is_mask(stem, listed.images):
                continue
            try:
                prompts, caption_file = read_prompts(listed.texts.get(stem, []), settings.caption_per_line)
            except UserError as error:
                unread.append(str(error))
                continue
            count, captioned = count + 1, captioned + bool(prompts)
            key = str((folder / stem).relative_to(root))
            mask, caption_file = listed.images.get(f"{stem}_mask"), caption_file or path.with_suffix(".txt")
            samples.append(Sample(key, path, (), prompts or instance_prompts, mask, caption_file=caption_file))
        counts |= {folder: (count, captioned)} if count else {}
        for stem, [path, *_] in listed.others.items():
            if stem not in listed.images and stem in listed.texts:
                unread.append(f"{none_of_the_formats(path)}, but has a caption")
    captioned = any(number for _, number in counts.values())
    bare = [f"{folder} ({count})" for folder, (count, number) in counts.items() if captioned and not number]
    notes = [f"no image has a caption in {listing(bare)}"] if bare else []
    repeats = {folder: match[1] for folder in counts if (match := KOHYA.match(folder.name))}
    if repeats and settings.repeats == 1:
        roots = ",".join(f'{{path: "{folder}", repeats: {number}}}' for folder, number in repeats.items())
        notes.append(f"the names of kohya's folders repeat nothing here; this does: data.root='[{roots}]'")
    return Found(samples, unread, passed_over, notes=tuple(notes)), captioned
