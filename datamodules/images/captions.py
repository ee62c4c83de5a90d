"""A data source of pictures with captions, for text-to-image, in whichever form a root holds them."""

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from datamodules.errors import UserError, listing
from datamodules.images.folders import FORMATS, Listing, controls_folders, is_clutter, is_mask, none_of_the_formats
from datamodules.images.forms import form_of_table, look_below
from datamodules.images.prompts import read_prompts
from datamodules.images.rows import Table, samples_of
from datamodules.images.sample import Found, Root, Sample, scan_roots
from datamodules.images.sources import note_unread
from datamodules.images.stored_tables import folder_table, named_table

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
    return scan_roots(roots, lambda root: _scan(root, (instance_prompt or "",) if root.require_prompt else ()))


def _scan(root: Root, instance_prompts: tuple[str, ...]) -> Found:
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
