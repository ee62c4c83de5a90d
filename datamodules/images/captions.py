"""A data source of pictures with captions, for text-to-image."""

import os
from collections.abc import Iterable
from pathlib import Path

from datamodules.errors import UserError
from datamodules.files import read_text
from datamodules.images.folders import (
    FORMATS,
    controls_folder,
    folder_images,
    is_mask,
    none_of_the_formats,
    unread_files,
)
from datamodules.images.sample import Found, Root, Sample, scan_roots


def find_captioned(roots: Iterable[Root], instance_prompt: str | None) -> Found:
    """Every `X.png` (.jpg, ...) in the folders and their subfolders, with caption `X.txt` and loss mask `X_mask.*`.

    Args:
        instance_prompt: the caption of pictures without one; None for the empty caption.

    Raises:
        UserError: a root is no folder, holds no pictures, or is a set of pairs.
    """
    return scan_roots(
        roots,
        lambda root: _scan(Path(root.path).expanduser(), (instance_prompt or "",) if root.require_prompt else ()),
    )


def _scan(root: Path, instance_prompts: tuple[str, ...]) -> Found:
    if not root.is_dir():
        what = "data=captions reads folders" if root.exists() else f"no such folder (looked for {root.absolute()})"
        raise UserError(f"data.root={root}: {what}")
    if controls_folder(root) is not None:
        raise UserError(
            f"data.root={root} is a set of pairs, for data=cached and a model that edits; data=captions takes pictures "
            "alone: give the folder of the targets"
        )
    samples: list[Sample] = []
    unread: list[str] = []
    seen: set[str] = set()
    for place, below, _ in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith("."))
        folder = Path(place)
        if (real := os.path.realpath(folder)) in seen:  # a link to a parent folder
            below.clear()
            continue
        seen.add(real)
        images = folder_images(folder)
        for stem, path in images.items():
            if is_mask(stem, images):
                continue
            caption = path.with_suffix(".txt")
            try:
                prompts = (read_text(caption).strip(),) if os.path.lexists(caption) else instance_prompts
            except UserError as error:
                unread.append(str(error))
                continue
            key = str((folder / stem).relative_to(root))
            samples.append(Sample(key, path, (), prompts, images.get(f"{stem}_mask"), caption_file=caption))
        for stem, path in unread_files(folder).items():
            if stem not in images and path.with_suffix(".txt").is_file():
                unread.append(f"{none_of_the_formats(path)}, but has a caption")
    if not samples and not unread:
        raise UserError(f"data.root={root}: no pictures ({FORMATS}) in it or below")
    return Found(samples, unread)
