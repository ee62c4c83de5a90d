"""A data source of pictures with captions, for text-to-image, in whichever form a root holds them."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from datamodules.errors import UserError
from datamodules.images.folders import (
    FORMATS,
    controls_folder,
    count_clutter,
    folder_images,
    is_clutter,
    is_mask,
    none_of_the_formats,
    unread_files,
)
from datamodules.images.forms import form_of_table, look_below
from datamodules.images.prompts import has_prompts, read_prompts
from datamodules.images.rows import Table, samples_of
from datamodules.images.sample import Found, Root, Sample, scan_roots
from datamodules.images.stored_tables import folder_table, named_table


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
    if controls_folder(path) is not None:
        raise UserError(
            f"data.root={path} is a set of pairs, for data=cached and a model that edits; data=captions takes pictures "
            "alone: give the folder of the targets"
        )
    if (form := form_of_table(path)) == "table":
        return read(*folder_table(path, form))
    found, captioned = _pictures(path, instance_prompts)
    if captioned or found.incomplete:
        return found
    if found.samples:  # without captions beside them: they may stand in a table
        below = look_below(path, lambda folder: "table" if form_of_table(folder) == "table" else None)
    else:
        below = (path, form) if form is not None else look_below(path, form_of_table)
    if below is not None:
        return read(*folder_table(*below))
    if not found.samples:
        raise UserError(f"data.root={path}: no pictures ({FORMATS}) in it or below")
    return found


def _pictures(root: Path, instance_prompts: tuple[str, ...]) -> tuple[Found, bool]:
    """The pictures of a folder and of those below, and whether any has a caption beside it."""
    samples: list[Sample] = []
    unread: list[str] = []
    seen: set[str] = set()
    passed_over, captioned = 0, False
    for place, below, _ in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not is_clutter(name))
        folder = Path(place)
        if (real := os.path.realpath(folder)) in seen:  # a link to a parent folder
            below.clear()
            continue
        seen.add(real)
        passed_over += count_clutter(folder)
        images = folder_images(folder)
        for stem, path in images.items():
            if is_mask(stem, images):
                continue
            try:
                prompts = read_prompts(path)
            except UserError as error:
                unread.append(str(error))
                continue
            captioned = captioned or bool(prompts)
            key = str((folder / stem).relative_to(root))
            mask, caption_file = images.get(f"{stem}_mask"), path.with_suffix(".txt")
            samples.append(Sample(key, path, (), prompts or instance_prompts, mask, caption_file=caption_file))
        for stem, path in unread_files(folder).items():
            if stem not in images and has_prompts(path):
                unread.append(f"{none_of_the_formats(path)}, but has a caption")
    return Found(samples, unread, passed_over), captioned
