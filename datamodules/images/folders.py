"""Naming rules for folders of images: which files are images, captions, further control images and masks."""

import os
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from datamodules.errors import UserError, listing
from datamodules.images.samples import CAPTION_SUFFIXES, Found, Root, Sample, nfc, read_prompts

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
TARGET_FOLDERS = ("training_images", "images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "controls", "condition_images")
REJECTED_FOLDERS = ("rejected_images",)
FORMATS = ", ".join(sorted(IMAGE_SUFFIXES))
# What systems and programs leave beside pictures.
CLUTTER = {"thumbs.db", "desktop.ini", "__macosx"}
FURTHER_CONTROL = re.compile(r"(?P<stem>.+)_control_(?P<number>\d+)$")
_NUMBERED_FOLDER = re.compile(rf"({'|'.join(CONTROL_FOLDERS)})[_-]?(\d+)")
# Folders below a data set that are searched for files that nothing reads.
SEARCHED = 2


def stem_of(path: Path) -> str:
    """Return the file's name without suffix, as names are compared."""
    return nfc(path.stem)


def find_file(folder: Path, name: str) -> Path:
    """Return the path of a name below a folder, in whichever Unicode form the disk has it."""
    path = folder / name
    if name.isascii() or os.path.lexists(path):
        return path
    for part in Path(name).parts:
        there = _names(folder, folder.stat().st_mtime_ns) if folder.is_dir() else {}
        folder /= there.get(nfc(part), part)
    return folder


@lru_cache(maxsize=64)
def _names(folder: Path, changed: int) -> dict[str, str]:
    """Return the names in a folder, which was changed at a time, by their composed form."""
    return {nfc(name): name for name in os.listdir(folder)}


def targets_folder(root: Path) -> Path | None:
    """Where a data set of pairs keeps its targets."""
    return _first_folder(root, TARGET_FOLDERS)


def controls_folders(root: Path) -> list[Path]:
    """Return the folders of a data set's condition images: `control`, then `control_1`, `control_2`, ... by number.

    Raises:
        UserError: two folders have the same number.
    """
    first = _first_folder(root, CONTROL_FOLDERS)
    found = {} if first is None else {-1: first}
    for name in sorted(os.listdir(root)) if root.is_dir() else []:
        if (match := _NUMBERED_FOLDER.fullmatch(name)) and (root / name).is_dir():
            number = int(match[2])
            if number in found:
                raise UserError(f"data.root={root}: {found[number].name} and {name} have the same number. Rename one")
            found[number] = root / name
    return [found[number] for number in sorted(found)]


def rejected_folder(root: Path) -> Path | None:
    """Where a data set of pairs keeps what is to be liked less than its targets."""
    return _first_folder(root, REJECTED_FOLDERS)


def folders_of_pairs(root: Path) -> tuple[Path, list[Path]] | None:
    """Return the folder of the targets and those of the condition images; None if one of them is missing."""
    targets, controls = targets_folder(root), controls_folders(root)
    return (targets, controls) if targets is not None and controls else None


def _first_folder(root: Path, names: tuple[str, ...]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


@dataclass(frozen=True)
class Listing:
    """The files of a folder by `stem_of`.

    Attributes:
        texts: the files that may hold captions.
        others: files that are neither, but may be images in another format.
        clutter: the number of files and folders that a system has left.
    """

    images: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, list[Path]] = field(default_factory=dict)
    others: dict[str, list[Path]] = field(default_factory=dict)
    clutter: int = 0

    @classmethod
    def of(cls, folder: Path) -> "Listing":
        """List a folder; raise UserError for two images of one stem, which would make a pair ambiguous."""
        names = os.listdir(folder)
        found = cls(clutter=sum(map(is_clutter, names)))
        for name in sorted(names):  # paths take much longer to sort
            path = folder / name
            stem, suffix = stem_of(path), path.suffix.lower()
            if is_clutter(name):
                continue
            if suffix in IMAGE_SUFFIXES:
                if stem in found.images:
                    raise UserError(f"{found.images[stem]} and {path}: two images of one name, keep one")
                found.images[stem] = path
            elif suffix in CAPTION_SUFFIXES:
                found.texts.setdefault(stem, []).append(path)
            elif not path.is_dir():
                found.others.setdefault(stem, []).append(path)
        return found


def is_clutter(name: str) -> bool:
    """Whether a file or folder is nobody's picture: hidden (`._x` of macOS, too), or left by a system."""
    return name.startswith(".") or name.lower() in CLUTTER


def none_of_the_formats(path: Path) -> str:
    """The message about a file in an unsupported format."""
    return f"{path} is none of {FORMATS}"


def no_caption(target: Path, wanted: Path, listings: Iterable[Listing]) -> str:
    """Return the message about a missing caption, which names the files that are there instead."""
    names = dict.fromkeys([stem_of(wanted), stem_of(target)])
    kinds = [kind for one in listings for kind in (one.texts, one.others)]
    there = [str(path) for kind in kinds for stem in names for path in kind.get(stem, [])]
    return f"{target} has no caption {wanted}" + (f" (there is {listing(there)})" if there else "")


def further_controls(images: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Return by stem X the images `X_control_1.*`, `X_control_2.*`, ..., by number."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for name, path in images.items():
        if match := FURTHER_CONTROL.match(name):
            found.setdefault(match["stem"], []).append((int(match["number"]), path))
    return {stem: [path for _, path in sorted(paths)] for stem, paths in found.items()}


def primary_images(images: dict[str, Path]) -> dict[str, Path]:
    """Those of a folder's images, by stem, that are no further controls and masks of others."""
    return {stem: path for stem, path in images.items() if not belongs_to_another(stem, images)}


def belongs_to_another(stem: str, stems: Container[str]) -> bool:
    """Whether an image is a further control or the mask of one of `stems`."""
    match = FURTHER_CONTROL.match(stem)
    return (match is not None and match["stem"] in stems) or is_mask(stem, stems)


def is_mask(stem: str, stems: Container[str]) -> bool:
    """Whether an image is the mask of one of `stems`."""
    return stem.endswith("_mask") and stem.removesuffix("_mask") in stems


def unread_beside(root: Path, read: Iterable[Path], captions: Iterable[Path]) -> list[str]:
    """Return a note on the files in and below a folder that bear the name of an image that is read, but are not read.

    Args:
        read: the images.
        captions: one caption file of each, whose suffix may be any.
    """
    known = {str(path) for path in read}
    stems = {stem_of(Path(name)) for name in known}
    texts = {nfc(str(path.parent / path.stem)) for path in captions}
    kinds: Counter[str] = Counter()
    for place, below, names in os.walk(root):
        depth = len(Path(place).relative_to(root).parts)
        inside = str(Path(place, "_"))[:-1]  # as paths are written, without ./
        below[:] = [name for name in below if depth < SEARCHED and not is_clutter(name)]
        for name in names:
            stem, suffix = os.path.splitext(name)
            plain = nfc(stem)
            if is_clutter(name) or not (plain in stems or belongs_to_another(plain, stems)):
                continue
            is_text = suffix.lower() in CAPTION_SUFFIXES and nfc(inside + stem) in texts
            if not is_text and inside + name not in known:
                kinds[os.path.relpath(f"{inside}*{suffix}", root)] += 1
    named = listing([f"{kind} ({count})" for kind, count in kinds.items()])
    return [f"{root}: not read, though named like images that are: {named}"] if kinds else []


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
