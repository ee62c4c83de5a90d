"""Pairs in one folder, told apart by how their names end: `X_start.png` and `X_end.png`."""

from collections.abc import Collection, Iterable
from pathlib import Path

from datamodules.errors import UserError
from datamodules.images.folders import (
    IMAGE_SUFFIXES,
    Listing,
    belongs_to_another,
    further_controls,
    is_clutter,
    no_caption,
    none_of_the_formats,
    stem_of,
)
from datamodules.images.prompts import read_prompts
from datamodules.images.sample import Found, Root, Sample

# How the names of controls and targets end.
USUAL = (
    ("_start", "_end"),
    ("_control", "_target"),
    ("_before", "_after"),
    ("_source", "_target"),
    ("_input", "_output"),
)


def suffixes_of(folder: Path, given: tuple[str, str] | None) -> tuple[str, str] | None:
    """How the names of a folder's pairs end; None if there are no such pairs.

    Args:
        given: instead of the usual ones.

    Raises:
        UserError: its names end in more than one of the usual ways.
    """
    stems = {stem_of(Path(name)) for name in _pictures(folder)}
    found = [ends for ends in ([given] if given else USUAL) if any(_roots(stems, *ends))]
    if len(found) > 1:
        ways = " and ".join(f"X{control}, X{target}" for control, target in found)
        raise UserError(f"data.root={folder}: pairs named {ways}: say which, as data.pair_suffixes={list(found[0])}")
    return found[0] if found else None


def _pictures(folder: Path) -> list[str]:
    return [
        path.name for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and not is_clutter(path.name)
    ]


def _roots(stems: set[str], control: str, target: str) -> Iterable[str]:
    """The names that pairs have in common."""
    roots = (stem.removesuffix(control) for stem in stems if stem.endswith(control))
    return (root for root in roots if root + target in stems)


def _roots_of(stems: Collection[str], control: str, target: str) -> list[str]:
    """The names before the endings of all pictures, also of those whose other half is missing.

    One ending may be empty, or end as the other does: the longer one counts.
    """
    longer, shorter = sorted((control, target), key=len, reverse=True)
    roots = {stem.removesuffix(longer) for stem in stems if stem.endswith(longer)}
    for stem in stems:
        if stem.endswith(shorter) and not stem.endswith(longer):
            root = stem.removesuffix(shorter)
            if shorter or root + longer in stems or not belongs_to_another(root, stems):
                roots.add(root)
    return sorted(roots)


def pairs_by_suffix(folder: Path, control: str, target: str, settings: Root) -> Found:
    """The pairs of a folder: `X{control}.*`, `X{target}.*`, a caption of X or of the target.

    Optionally further controls `X_control_1.*`, `X_control_2.*`, ..., and a mask, `X_mask.*`.

    Args:
        control, target: the endings.
        settings: whether a pair needs a caption, and how captions are read.

    Raises:
        UserError: two pictures have one name.
    """
    listed = Listing.of(folder)
    images, unread, further = listed.images, listed.others, further_controls(listed.images)
    roots = _roots_of(images, control, target)
    used: set[Path] = set()
    samples: list[Sample] = []
    incomplete: list[str] = []
    for root in roots:
        ends = {end: images.get(root + end) for end in (control, target)}
        used.update(path for path in ends.values() if path is not None)
        source, result = ends[control], ends[target]
        more = further.get(root, [])
        mask = images.get(f"{root}_mask")
        used.update([*more, *([mask] if mask else [])])
        if not root:
            incomplete.append(f"{source or result} is named by its ending alone: put a name before it")
            continue
        if source is None or result is None:
            lost = root + (control if source is None else target)
            other = f": {none_of_the_formats(unread[lost][0])}" if lost in unread else ""
            incomplete.append(f"{source or result} has no {folder / lost}.*{other}")
            continue
        stems = dict.fromkeys((root, stem_of(result)))  # one, where the target's ending is empty
        texts = [path for stem in stems for path in listed.texts.get(stem, [])]
        wanted = folder / f"{root}.txt"
        try:
            prompts, caption_file = read_prompts(texts, settings.caption_per_line)
        except UserError as error:
            incomplete.append(str(error))
            continue
        if prompts or not settings.require_prompt:
            caption_file = caption_file or wanted
            samples.append(Sample(root, result, (source, *more), prompts, mask, caption_file=caption_file))
        else:
            incomplete.append(no_caption(result, wanted, [listed]))
    incomplete += [
        f"{path} is neither X{control} nor X{target} of a pair" for path in images.values() if path not in used
    ]
    incomplete += [
        none_of_the_formats(path)
        for stem, [path, *_] in unread.items()
        if any(end and stem.endswith(end) and stem.removesuffix(end) not in roots for end in (control, target))
    ]
    return Found(samples, incomplete, listed.clutter, forms=("pair_suffixes",))
