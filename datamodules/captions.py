"""Pictures with captions, for text-to-image."""

from collections.abc import Iterable
from pathlib import Path

from datamodules.errors import UserError
from datamodules.sources import Found, Sample, controls_folder, folder_images, read_text, scan_roots


def find_captioned(roots: Iterable[str | Path], instance_prompt: str | None) -> Found:
    """Every `X.png` (.jpg, ...) of the folders with the caption `X.txt`; `X_mask.*` weighs the loss.

    Args:
        instance_prompt: the caption of pictures without one; None for the empty caption.

    Raises:
        UserError: a root is no folder, holds no pictures, or is a set of pairs.
    """
    return scan_roots(roots, lambda folder: _scan(folder, instance_prompt or ""))


def _scan(folder: Path, instance_prompt: str) -> Found:
    if not folder.is_dir():
        raise UserError(f"data.root={folder}: no such folder (looked for {folder.absolute()})")
    images = folder_images(folder)
    masks = {stem: path for stem, path in images.items() if stem.endswith("_mask") and stem[:-5] in images}
    if not images:
        if controls_folder(folder) is not None:
            raise UserError(
                f"data.root={folder} is a set of pairs: leave data=cached for a model that edits, or train on its "
                "targets alone by naming their folder"
            )
        raise UserError(
            f"data.root={folder}: no pictures in the folder itself; data=captions looks for X.png and X.txt"
        )
    samples = []
    for stem, path in images.items():
        if stem in masks:
            continue
        caption = path.with_suffix(".txt")
        prompt = read_text(caption).strip() if caption.is_file() else instance_prompt
        samples.append(Sample(stem, path, (), prompt, masks.get(f"{stem}_mask")))
    orphans = [path for path in sorted(folder.glob("*.txt")) if path.stem not in images]
    return Found(samples, [f"{path} has no picture beside it" for path in orphans])
