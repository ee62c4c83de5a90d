"""Pairs in two folders: targets with their captions, and controls of the same names; and rejected ones in a third."""

from pathlib import Path

from datamodules.errors import UserError
from datamodules.images.folders import (
    FURTHER_CONTROL,
    count_clutter,
    folder_images,
    further_controls,
    none_of_the_formats,
    primary_images,
    unread_files,
)
from datamodules.images.prompts import has_prompts, read_prompts
from datamodules.images.sample import Found, Sample


def pairs_of_folders(
    target_folder: Path, control_folder: Path, rejected_folder: Path | None, require_prompt: bool
) -> Found:
    """The pairs of two folders, by name.

    Args:
        rejected_folder: of what is to be liked less than the targets; None where there is none.
        require_prompt: whether a pair without caption is incomplete.

    Raises:
        UserError: two pictures have one name.
    """
    all_targets, all_controls = folder_images(target_folder), folder_images(control_folder)
    targets, controls = primary_images(all_targets), primary_images(all_controls)
    masks = {**all_targets, **all_controls}
    numbered: dict[str, dict[str, Path]] = {}
    for name, path in all_controls.items():
        if match := FURTHER_CONTROL.match(name):
            numbered.setdefault(match["stem"], {})[name] = path
    rejected = {} if rejected_folder is None else folder_images(rejected_folder)
    unread, unread_controls = unread_files(target_folder), unread_files(control_folder)
    samples, incomplete = [], []
    for stem, target in targets.items():
        if stem not in controls:
            other = f": {none_of_the_formats(unread_controls[stem])}" if stem in unread_controls else ""
            incomplete.append(f"{target} has no control image {control_folder / stem}.*{other}")
            continue
        try:
            prompts = read_prompts(target)
        except UserError as error:
            incomplete.append(str(error))
            continue
        if not prompts and require_prompt:
            incomplete.append(f"{target} has no caption {target.with_suffix('.txt')}")
            continue
        more = further_controls(numbered.get(stem, {}), stem)
        mask, caption_file = masks.get(f"{stem}_mask"), target.with_suffix(".txt")
        pictures = target, (controls[stem], *more)
        samples.append(Sample(stem, *pictures, prompts, mask, rejected.get(stem), caption_file=caption_file))
    for stem, path in unread.items():  # else a pair in such a format would be left out silently
        if stem not in targets and (stem in controls or has_prompts(path)):
            incomplete.append(f"target {none_of_the_formats(path)}")
    known = {*targets, *unread}
    for others in (controls, rejected):
        incomplete += [f"{path} has no target image" for stem, path in others.items() if stem not in known]
    folders = {target_folder, control_folder, *([] if rejected_folder is None else [rejected_folder])}
    if rejected_folder is not None:
        incomplete += [none_of_the_formats(path) for path in unread_files(rejected_folder).values()]
    return Found(samples, incomplete, sum(map(count_clutter, folders)))
