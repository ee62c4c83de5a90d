"""Pairs in folders: targets with their captions, controls of the same names in one or several, and rejected ones."""

from collections.abc import Sequence
from pathlib import Path

from datamodules.errors import UserError
from datamodules.images.folders import Listing, further_controls, no_caption, none_of_the_formats, primary_images
from datamodules.images.prompts import read_prompts
from datamodules.images.sample import Found, Root, Sample


def pairs_of_folders(
    target_folder: Path, control_folders: Sequence[Path], rejected_folder: Path | None, root: Root
) -> Found:
    """Return the pairs of folders, by name.

    Args:
        control_folders: those of the first condition images, of the second, ...; only the first must have all.
        rejected_folder: of what is to be liked less than the targets; None where there is none.

    Raises:
        UserError: two pictures of a folder have one name.
    """
    of_targets, *of_controls = map(Listing.of, (target_folder, *control_folders))
    of_rejected = Listing() if rejected_folder is None else Listing.of(rejected_folder)
    targets, controls = primary_images(of_targets.images), [primary_images(one.images) for one in of_controls]
    further = [further_controls(one.images) for one in of_controls]
    masks = {stem: path for one in (of_targets, *of_controls) for stem, path in one.images.items()}
    samples, incomplete = [], []
    for stem, target in targets.items():
        count = max((number for number, images in enumerate(controls, 1) if stem in images), default=1)
        lost = next((number for number in range(count) if stem not in controls[number]), None)
        if lost is not None:
            unread = of_controls[lost].others.get(stem)
            other = f": {none_of_the_formats(unread[0])}" if unread else ""
            incomplete.append(f"{target} has no control image {control_folders[lost] / stem}.*{other}")
            continue
        try:
            prompts, caption_file = read_prompts(of_targets.texts.get(stem, []), root.caption_per_line)
        except UserError as error:
            incomplete.append(str(error))
            continue
        if not prompts and root.require_prompt:
            incomplete.append(no_caption(target, target.with_suffix(".txt"), [of_targets, *of_controls]))
            continue
        own = [(one[stem], *more.get(stem, [])) for one, more in zip(controls, further, strict=True) if stem in one]
        pictures = target, tuple(path for some in own for path in some)
        mask, caption_file = masks.get(f"{stem}_mask"), caption_file or target.with_suffix(".txt")
        samples.append(Sample(stem, *pictures, prompts, mask, of_rejected.images.get(stem), caption_file=caption_file))
    for stem, [path, *_] in of_targets.others.items():  # else a pair in such a format would be left out silently
        if stem not in targets and (stem in controls[0] or stem in of_targets.texts):
            incomplete.append(f"target {none_of_the_formats(path)}")
    known = {*targets, *of_targets.others}
    for others in (*controls, of_rejected.images):
        incomplete += [f"{path} has no target image" for stem, path in others.items() if stem not in known]
    for one in (of_rejected, *of_controls[1:]):
        incomplete += [none_of_the_formats(path) for stem, [path, *_] in one.others.items() if stem not in one.images]
    return Found(samples, incomplete, sum(one.clutter for one in (of_targets, of_rejected, *of_controls)))
