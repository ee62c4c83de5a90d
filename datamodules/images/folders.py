"""Folders of images: which files belong together by their names, and the samples that they form."""

import os
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from datamodules.images.captions import parsed, read_captions
from datamodules.images.samples import CAPTION_SUFFIXES, Found, Root, Sample, nfc
from foundation.errors import UserError, listing
from foundation.files import read_text

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
IMAGE_FORMATS = ", ".join(sorted(IMAGE_SUFFIXES))
TARGET_FOLDERS = ("training_images", "images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "controls", "condition_images")
REJECTED_FOLDER = "rejected_images"
# Endings of the names of controls and targets in one folder.
USUAL_ENDINGS = (
    ("_start", "_end"),
    ("_control", "_target"),
    ("_before", "_after"),
    ("_source", "_target"),
    ("_input", "_output"),
)
# Masks of images: endings of their names, and the folders that they are in.
MASK_ENDINGS = ("_mask", "-mask", ".mask", "-masklabel", "_masklabel")
MASK_FOLDERS = ("masks", "mask")
SWAP = ".swap"  # of a caption from target to control
# Endings of images that belong to another one and are not read.
UNREAD_ENDINGS = ("-condlabel",)
# Files and folders left by systems and programs; hidden ones are passed over as well.
CLUTTER = {
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "__pycache__", "lost+found", "system volume information"),
    *("$recycle.bin", "@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", ".@__thumb", "@tmp"),
}
# Files of tables and data sets.
STORED = (".csv", ".jsonl", ".json", ".tar", ".parquet", ".arrow")
_SIGN = re.compile(r"[\W_]")
_FURTHER_CONTROL = re.compile(r"(?P<stem>.+)_control_(?P<number>\d+)$")
_NUMBERED_FOLDER = re.compile(rf"({'|'.join(CONTROL_FOLDERS)})[_-]?(\d+)")


def stem_of(path: Path) -> str:
    """Return the name of a file without suffix, in the form in which names are compared."""
    return nfc(path.stem)


def is_image(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_clutter(name: str) -> bool:
    """Return whether a file or folder is hidden (as `._x` of macOS) or left by a system."""
    return name.startswith(".") or name.lower() in CLUTTER


@dataclass(frozen=True)
class Listing:
    """The files of a folder by `stem_of`.

    Attributes:
        place: path of the folder below its root, in composed Unicode.
        ending: the part of file names after the stem; see `halves`.
        texts: files that may hold captions.
        others: all other files.
        masks: masks in a folder of their own, each with the stem of its image.
    """

    folder: Path
    place: Path = Path()
    ending: str = ""
    images: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, list[Path]] = field(default_factory=dict)
    others: dict[str, list[Path]] = field(default_factory=dict)
    masks: list[tuple[str, Path]] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, place: Path = Path()) -> "Listing":
        """List a folder.

        Raises:
            UserError: two images have one stem, so a pair would be ambiguous.
        """
        found = cls(folder, place)
        for name in sorted(name for name in os.listdir(folder) if not is_clutter(name)):
            path = folder / name
            stem, suffix = stem_of(path), path.suffix.lower()
            if suffix in IMAGE_SUFFIXES:
                if stem in found.images:
                    raise UserError(f"{found.images[stem]} and {path}: two images of one name, keep one")
                found.images[stem] = path
            elif suffix in CAPTION_SUFFIXES:
                found.texts.setdefault(stem, []).append(path)
            elif not path.is_dir():
                found.others.setdefault(stem, []).append(path)
        return found

    def add_masks(self, masks: "Listing") -> bool:
        """Add the images of a folder of masks, X or X_mask for X; return whether any belongs to these images."""
        stems = (stem if stem in self.images else _without(stem, MASK_ENDINGS, self.images) for stem in masks.images)
        found = [(stem, path) for stem, path in zip(stems, masks.images.values(), strict=True) if stem]
        self.masks.extend(found)
        return bool(found)

    def primary(self) -> dict[str, Path]:
        """Return the images by stem, without masks and further controls of others."""
        return {stem: path for stem, path in self.images.items() if not belongs_to_another(stem, self.images)}

    def captions(self, stem: str, per_line: bool) -> tuple[tuple[str, ...], Path]:
        """Return the captions of an image, and the file that holds them or would.

        Raises:
            UserError: a file cannot be read, or two files differ.
        """
        contents = {str(path): parsed(read_text(path), str(path)) for path in self.texts.get(stem, [])}
        prompts, name = read_captions(contents, per_line)
        return prompts, self.folder / f"{stem}{CAPTION_SUFFIXES[0]}" if name is None else Path(name)

    def lack(self, stem: str) -> str:
        """Return the name of an image that is missing here, and the file in another format that is there instead."""
        other = self.others.get(stem + self.ending)
        return f"{self.folder / stem}{self.ending}.*" + (f": {unsupported(other[0])}" if other else "")

    def halves(self, control: str, target: str) -> tuple["Listing", "Listing"]:
        """Split pairs in one folder into a folder of controls and one of targets.

        An ending may be empty, or end like the other one: the longer one counts. Images with neither are listed among
        the controls, as further controls, masks or lone images.
        """
        longer, shorter = sorted((control, target), key=len, reverse=True)
        images: dict[str, dict[str, Path]] = {control: {}, target: {}}
        rest = {}
        for stem, path in self.images.items():
            end = next((end for end in (longer, shorter) if stem.endswith(end) and stem != end), None)
            if end == "" and belongs_to_another(stem, self.images) and stem + longer not in self.images:
                end = None
            if end is None:
                rest[stem] = path
            else:
                images[end][stem.removesuffix(end)] = path
        stems = {*images[control], *images[target]}
        names = {s: dict.fromkeys((s, s + target)) for s in stems} | {s + SWAP: {s + SWAP: None} for s in stems}
        texts = {stem: [path for name in both for path in self.texts.get(name, [])] for stem, both in names.items()}
        first, second = (dict(sorted(images[end].items())) for end in (control, target))
        return (
            replace(self, ending=control, images=first | rest, texts={}, masks=[]),
            replace(self, ending=target, images=second, texts=texts, masks=[]),
        )


def listings_below(top: Path) -> dict[Path, Listing]:
    """Return the listings of a folder and of all folders below it, by their relative path."""
    places = {Path(nfc(os.path.relpath(folder, top))): Path(folder) for folder, _ in walk(top)}
    return {place: Listing.of(folder, place) for place, folder in places.items()}


def walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and all folders below it, and their file names, without clutter.

    Raises:
        UserError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    parents: dict[str, tuple[str, ...]] = {}
    for place, below, names in os.walk(top, followlinks=True, onerror=refuse):
        below[:] = sorted(name for name in below if not is_clutter(name))
        above, real = parents.get(os.path.dirname(place), ()), os.path.realpath(place)
        parents[place] = (*above, real)
        if real in above:  # a link to a parent folder
            below.clear()
            continue
        yield place, sorted(name for name in names if not is_clutter(name))


def leave_out_derived(below: dict[Path, Listing], kept: Container[Path] = ()) -> None:
    """Leave out masks, which are added to their images, and folders that are made of captioned images, as depth maps.

    The latter have no captions, and all of their images are named like others. These are in the folder with the same
    path but for one part, which is missing or another: `b/X` for `b/masks/X` and `masks/b/X`, `images/X` for `masks/X`.

    Args:
        below: as `listings_below`.
        kept: folders that stay, unless they are of masks.
    """
    alike: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    for place in below:
        for index in range(len(place.parts)):
            alike[(*place.parts[:index], "", *place.parts[index + 1 :])].append(place)
    for place, one in list(below.items()):
        if not one.images or any(stem in one.texts for stem in one.images):
            continue
        for index, part in enumerate(place.parts):
            start, end = place.parts[:index], place.parts[index + 1 :]
            others = [below[other] for other in (Path(*start, *end), *alike[(*start, "", *end)]) if other in below]
            others = [other for other in others if other is not one and other.images]
            if part.lower() in MASK_FOLDERS and others:
                is_derived = any(other.add_masks(one) for other in others)
            else:
                is_derived = place not in kept and any(
                    all(base_of(stem, other.texts) in other.images for stem in one.images) for other in others
                )
            if is_derived:
                del below[place]
                break


def base_of(stem: str, stems: Container[str]) -> str:
    """Return the longest one of `stems` that a name is, or begins with before a sign: `X` for `X-2` and `X.depth`."""
    ends = [len(stem), *(sign.start() for sign in reversed(list(_SIGN.finditer(stem))))]
    return next((stem[:end] for end in ends if stem[:end] in stems), "")


def belongs_to_another(stem: str, stems: Container[str]) -> bool:
    """Return whether an image is a further control, a mask or another companion of one of `stems`."""
    match = _FURTHER_CONTROL.match(stem)
    return (match is not None and match["stem"] in stems) or bool(
        _without(stem, (*MASK_ENDINGS, *UNREAD_ENDINGS), stems)
    )


def _without(stem: str, endings: Iterable[str], stems: Container[str]) -> str:
    """Return the one of `stems` that a name is with one of the endings in any case; "" if none."""
    found = (stem[: -len(end)] for end in endings if stem.lower().endswith(end))
    return next((one for one in found if one in stems), "")


def further_controls(images: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Return by stem X the images `X_control_1.*`, `X_control_2.*`, ... by number.

    Raises:
        UserError: their numbers are not 1, 2, ...: with one missing, the others would be taken for it.
    """
    numbered: dict[str, list[tuple[int, Path]]] = {}
    for name, path in images.items():
        if (match := _FURTHER_CONTROL.match(name)) and match["stem"] in images:
            numbered.setdefault(match["stem"], []).append((int(match["number"]), path))
    for further in numbered.values():
        for expected, (number, path) in enumerate(sorted(further), 1):
            if number != expected:
                raise UserError(f"{path}: further controls are numbered 1, 2, ..., and this should be {expected}")
    return {stem: [path for _, path in sorted(further)] for stem, further in numbered.items()}


def unsupported(name: Path | str) -> str:
    """Return the message about a file in an unsupported format."""
    return f"{name} has an unsupported format (supported: {IMAGE_FORMATS})"


def first_folder(root: Path, names: Sequence[str]) -> Path | None:
    """Return the first folder below `root` with one of these names."""
    return next((root / name for name in names if (root / name).is_dir()), None)


def with_masks(listing: Listing, root: Path) -> Listing:
    """Add the masks of a root's own folder of masks to a listing of images."""
    for name in os.listdir(root):
        if name.lower() in MASK_FOLDERS and (masks := root / name / listing.place).is_dir():
            listing.add_masks(Listing.of(masks))
    return listing


def controls_folders(root: Path) -> list[Path]:
    """Return the folders of a data set's condition images: `control`, then `control_1`, `control_2`, ... by number.

    Raises:
        UserError: two folders have the same number, or one is missing: the next would be taken for it.
    """
    first = first_folder(root, CONTROL_FOLDERS)
    found = {} if first is None else {-1: first}
    for name in sorted(os.listdir(root)):
        if (match := _NUMBERED_FOLDER.fullmatch(name)) and (root / name).is_dir():
            number = int(match[2])
            if number in found:
                raise UserError(f"data.root={root}: {found[number].name} and {name} have the same number. Rename one")
            found[number] = root / name
    numbers = sorted(found)
    counted, starts = (numbers, (0, 1)) if first is None else (numbers[1:], (1, 2))
    if counted and (counted[0] not in starts or counted[-1] - counted[0] != len(counted) - 1):
        named = listing([found[number].name for number in numbers], len(numbers))
        raise UserError(f"data.root={root}: {named}: a number is missing, so that a later folder would take its place")
    return [found[number] for number in numbers]


def endings_of(folder: Path, given: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return the endings of the names of a folder's pairs; None if there are no such pairs.

    Args:
        given: instead of the usual ones.

    Raises:
        UserError: names end in more than one of the usual ways.
    """
    stems = {stem_of(Path(name)) for name in os.listdir(folder) if is_image(name) and not is_clutter(name)}
    found = [
        (control, target)
        for control, target in ([given] if given else USUAL_ENDINGS)
        if any(stem.endswith(control) and stem.removesuffix(control) + target in stems for stem in stems)
    ]
    if len(found) > 1:
        ways = " and ".join(f"X{control}, X{target}" for control, target in found)
        raise UserError(f"data.root={folder}: pairs named {ways}: say which, as data.pair_suffixes={list(found[0])}")
    return found[0] if found else None


def samples_by_name(targets: Listing, controls: Sequence[Listing], rejected: Listing | None, root: Root) -> Found:
    """Return the samples of a root: files with the same stem belong together.

    Args:
        targets: targets, captions and masks.
        controls: first condition images with further ones and masks, then second ones, ...; a sample has the first n.
            Empty: images with captions.
    """
    primary, images = targets.primary(), [one.primary() for one in controls]
    further = [further_controls(one.images) for one in controls]
    rejects = {} if rejected is None else rejected.images
    parts = [part for one in (targets, *controls) for part in (one.texts, one.others)]
    beside: dict[str, dict[str, None]] = defaultdict(dict)
    for stem, paths in (item for part in parts for item in part.items()):
        beside[base_of(stem, primary)] |= dict.fromkeys(map(str, paths))
    masks: dict[str, list[Path]] = defaultdict(list)
    for one in (targets, *controls):
        named = ((_without(stem, MASK_ENDINGS, primary), path) for stem, path in one.images.items())
        for stem, path in (*named, *one.masks):
            masks[stem].append(path)
    captioned = targets.texts.keys() & primary.keys()
    mask_folder = Path(root.path).expanduser() / MASK_FOLDERS[0] / targets.place
    samples, incomplete = [], []
    for stem, target in primary.items():
        count = max((number for number, one in enumerate(images, 1) if stem in one), default=min(1, len(images)))
        if lost := next((controls[number] for number in range(count) if stem not in images[number]), None):
            incomplete.append(f"{target} has no control image {lost.lack(stem)}")
            continue
        try:
            prompts, caption_file = targets.captions(stem, root.caption_per_line)
            swapped = tuple(filter(None, targets.captions(stem + SWAP, root.caption_per_line)[0])) if root.swap else ()
        except UserError as error:
            incomplete.append(str(error))
            continue
        if len(masks[stem]) > 1:
            incomplete.append(f"{masks[stem][0]} and {masks[stem][1]}: two masks of one image, keep one")
            continue
        if not prompts and not controls and base_of(stem, captioned) not in ("", stem):
            continue  # made of an image with a caption
        if root.require_prompt and not prompts:
            hint = f" (there is {listing(list(beside[stem]))})" if beside[stem] else ""
            incomplete.append(f"{target} has no caption {caption_file}{hint}")
            continue
        own = [path for number in range(count) for path in (images[number][stem], *further[number].get(stem, []))]
        mask = next(iter(masks[stem]), None)
        files = caption_file, mask or mask_folder / f"{stem}.png"
        key = (targets.place / stem).as_posix()
        samples.append(Sample(key, target, tuple(own), prompts, mask, rejects.get(stem), 0, *files, swapped))
    for others in (*images, rejects):
        alone = [(stem, path) for stem, path in others.items() if stem not in primary]
        incomplete += [f"{path} has no target image {targets.lack(stem)}" for stem, path in alone]
    known = {*primary, *(stem for others in images for stem in others)}
    for stem in sorted(targets.texts.keys() & targets.others.keys() - known):
        incomplete.append(f"{unsupported(targets.others[stem][0])}, but it has a caption")
    return Found(samples, incomplete)


def note_unread(found: Found, folder: Path, root: Root) -> Found:
    """Add a note on the files in and below a folder that no root reads, counted by folder and ending."""
    images = [(one.target, *one.controls, one.mask, one.rejected) for one in found.samples]
    read = {_identity(path) for some in images for path in some if isinstance(path, Path)}
    stems = {stem_of(path) for some in images for path in some if isinstance(path, Path)}
    captions = [(one.caption_file, Path(one.key).name + SWAP) for one in found.samples if one.caption_file]
    texts = {_identity(path.with_suffix("")) for path, _ in captions}
    texts |= {_identity(path.with_name(name)) for path, name in captions if root.swap}
    kinds: dict[tuple[Path, str], list[str]] = defaultdict(list)
    others = {_identity(Path(path).expanduser()) for path in root.others}
    for place, names in walk(folder):
        below = Path(place).relative_to(folder)
        if not others.isdisjoint(_identity(folder / one) for one in (below, *below.parents) if one != Path()):
            continue
        for path in (Path(place, name) for name in names):
            suffix = path.suffix.lower()
            is_caption = suffix in CAPTION_SUFFIXES and _identity(path.with_suffix("")) in texts
            if is_caption or _identity(path) in read or (found.form == "columns" and suffix in STORED):
                continue
            stem, base = stem_of(path), base_of(stem_of(path), stems)
            kinds[below, (stem[len(base) :] if base else "") + path.suffix].append((below / path.name).as_posix())
    if not kinds:
        return found
    named = [
        names[0] if len(names) == 1 else f"{(place / f'*{end}').as_posix()} ({len(names)})"
        for (place, end), names in sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    ]
    return replace(found, notes=(*found.notes, f"{folder}: not read: {listing(named, 6)}"))


def _identity(path: Path) -> str:
    return nfc(os.path.normcase(os.path.abspath(path)))
