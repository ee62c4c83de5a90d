"""Folders of images: which files belong together by their names, and the samples that they form."""

import json
import os
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import read_text
from datamodules.images.samples import CAPTION_SUFFIXES, Found, Root, Sample, nfc

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
FORMATS = ", ".join(sorted(IMAGE_SUFFIXES))
# Keys of a JSON object that hold captions.
CAPTION_KEYS = ("captions", "caption", "prompt")
TARGET_FOLDERS = ("training_images", "images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "controls", "condition_images")
REJECTED_FOLDERS = ("rejected_images",)
# Endings of the names of controls and targets in one folder.
USUAL_ENDINGS = (
    ("_start", "_end"),
    ("_control", "_target"),
    ("_before", "_after"),
    ("_source", "_target"),
    ("_input", "_output"),
)
# Files left by systems and programs, besides hidden ones.
CLUTTER = {"thumbs.db", "desktop.ini", "__macosx"}
# Depth to which a data set is searched for unread files.
SEARCHED = 2
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
        ending: the part of file names after the stem; see `halves`.
        texts: files that may hold captions.
        others: all other files.
    """

    folder: Path
    ending: str = ""
    images: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, list[Path]] = field(default_factory=dict)
    others: dict[str, list[Path]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Listing":
        """List a folder.

        Raises:
            UserError: two images have one stem, so a pair would be ambiguous.
        """
        found = cls(folder)
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
        return f"{self.folder / stem}{self.ending}.*" + (f": {none_of_the_formats(other[0])}" if other else "")

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
        names = {stem: dict.fromkeys((stem, stem + target)) for stem in stems}
        texts = {stem: [path for name in both for path in self.texts.get(name, [])] for stem, both in names.items()}
        first, second = (dict(sorted(images[end].items())) for end in (control, target))
        return (
            Listing(self.folder, control, first | rest, {}, self.others),
            Listing(self.folder, target, second, texts, self.others),
        )


def belongs_to_another(stem: str, stems: Container[str]) -> bool:
    """Return whether an image is a further control or the mask of one of `stems`."""
    match = _FURTHER_CONTROL.match(stem)
    return (match is not None and match["stem"] in stems) or (
        stem.endswith("_mask") and stem.removesuffix("_mask") in stems
    )


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


def none_of_the_formats(path: Path) -> str:
    """Return the message about a file in an unsupported format."""
    return f"{path} is none of {FORMATS}"


def first_folder(root: Path, names: Sequence[str]) -> Path | None:
    """Return the first folder below `root` with one of these names."""
    return next((root / name for name in names if (root / name).is_dir()), None)


def controls_folders(root: Path) -> list[Path]:
    """Return the folders of a data set's condition images: `control`, then `control_1`, `control_2`, ... by number.

    Raises:
        UserError: two folders have the same number.
    """
    first = first_folder(root, CONTROL_FOLDERS)
    found = {} if first is None else {-1: first}
    for name in sorted(os.listdir(root)):
        if (match := _NUMBERED_FOLDER.fullmatch(name)) and (root / name).is_dir():
            number = int(match[2])
            if number in found:
                raise UserError(f"data.root={root}: {found[number].name} and {name} have the same number. Rename one")
            found[number] = root / name
    return [found[number] for number in sorted(found)]


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


def samples_by_name(
    targets: Listing, controls: Sequence[Listing], rejected: Listing | None, root: Root, require_prompt: bool
) -> Found:
    """Return the samples of a root: files with the same stem belong together.

    Args:
        targets: targets, captions and masks.
        controls: first condition images with further ones and masks, then second ones, ...; a sample has the first n.
            Empty: images with captions.
    """
    primary, images = targets.primary(), [one.primary() for one in controls]
    further = [further_controls(one.images) for one in controls]
    masks = {stem: path for one in (targets, *controls) for stem, path in one.images.items()}
    rejects = {} if rejected is None else rejected.images
    samples, incomplete = [], []
    for stem, target in primary.items():
        count = max((number for number, one in enumerate(images, 1) if stem in one), default=min(1, len(images)))
        if lost := next((controls[number] for number in range(count) if stem not in images[number]), None):
            incomplete.append(f"{target} has no control image {lost.lack(stem)}")
            continue
        try:
            prompts, caption_file = targets.captions(stem, root.caption_per_line)
        except UserError as error:
            incomplete.append(str(error))
            continue
        if require_prompt and not prompts:
            parts = [part for one in (targets, *controls) for part in (one.texts, one.others)]
            there = dict.fromkeys(str(path) for part in parts for path in part.get(stem, []))
            hint = f" (there is {listing(list(there))})" if there else ""
            incomplete.append(f"{target} has no caption {caption_file}{hint}")
            continue
        own = [path for number in range(count) for path in (images[number][stem], *further[number].get(stem, []))]
        beside = masks.get(f"{stem}_mask"), rejects.get(stem)
        samples.append(Sample(stem, target, tuple(own), prompts, *beside, caption_file=caption_file))
    for others in (*images, rejects):
        alone = [(stem, path) for stem, path in others.items() if stem not in primary]
        incomplete += [f"{path} has no target image {targets.lack(stem)}" for stem, path in alone]
    named = {*primary, *(stem for others in images for stem in others)}
    for stem in sorted(targets.texts.keys() & targets.others.keys() - named):
        incomplete.append(f"{none_of_the_formats(targets.others[stem][0])}, but has a caption")
    return Found(samples, incomplete)


def note_unread(found: Found, folder: Path) -> Found:
    """Add a note on the files in and below a folder that have the stem of a sample's image, but are not read."""
    images = [(one.target, *one.controls, one.mask, one.rejected) for one in found.samples]
    read = {path for some in images for path in some if isinstance(path, Path)}
    stems = {stem_of(path) for path in read}
    texts = {nfc(str(one.caption_file.with_suffix(""))) for one in found.samples if one.caption_file is not None}
    kinds: Counter[str] = Counter()
    for path in (path for depth in range(SEARCHED + 1) for path in sorted(folder.glob("*/" * depth + "*")) if read):
        stem, below = stem_of(path), path.relative_to(folder)
        is_caption = path.suffix.lower() in CAPTION_SUFFIXES and nfc(str(path.with_suffix(""))) in texts
        if path in read or is_caption or path.is_dir() or any(map(is_clutter, below.parts)):
            continue
        if stem in stems or belongs_to_another(stem, stems):
            kinds[str(below.with_name(f"*{path.suffix}"))] += 1
    if not kinds:
        return found
    named = listing([f"{kind} ({count})" for kind, count in kinds.items()])
    note = f"{folder}: not read, though named like images that are: {named}"
    return replace(found, notes=(*found.notes, note))


# Captions of an image: one or several, in files next to it or in the columns of a table.


def read_captions(contents: Mapping[str, Any], per_line: bool = True) -> tuple[tuple[str, ...], str | None]:
    """Return the captions of an image and the name of the file that holds them; () and None if no file does.

    Args:
        contents: of X.txt, X.caption and X.json by file name, as `parsed`; any may be missing.
        per_line: treat each line of a text as a caption.

    Raises:
        UserError: the only file holds no captions, or two files differ.
    """
    found: dict[str, tuple[str, ...]] = {}
    for suffix in CAPTION_SUFFIXES:
        for name, content in contents.items():
            if name.lower().endswith(suffix):
                prompts = (
                    _json_prompts(content, name, not found) if suffix == ".json" else text_prompts(content, per_line)
                )
                found |= {name: prompts} if prompts else {}
    if len({tuple(" ".join(prompts).split()) for prompts in found.values()}) > 1:
        raise UserError(f"{' and '.join(found)} hold different captions of one image. Keep one")
    return next(((prompts, name) for name, prompts in found.items()), ((), None))


def text_prompts(text: str, per_line: bool = True) -> tuple[str, ...]:
    """Return each non-empty line, or the whole text if it is a JSON object or array; ("",) if there is none.

    Lines end as on Unix, Windows and old Macs, not at other separators of Unicode.
    """
    with suppress(ValueError, RecursionError):
        per_line = per_line and not isinstance(json.loads(text), dict | list)
    lines = re.split("\r\n?|\n", text)
    return _stripped(lines if per_line else ["\n".join(lines)])


def parsed(text: str, name: str) -> Any:
    """Return a text as it is, but the content of a JSON file; raises a UserError if it is none."""
    try:
        return json.loads(text) if name.lower().endswith(".json") else text
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {getattr(error, 'msg', error)}") from error


def _json_prompts(value: Any, name: str, alone: bool) -> tuple[str, ...]:
    """Return the captions of a JSON file; () if it is about something else, and not `alone`.

    Raises:
        UserError: it holds no captions.
    """
    if isinstance(value, dict):
        value = next((value[key] for key in CAPTION_KEYS if value.get(key) is not None), None)
    prompts = None if value is None else captions_of(value)
    if prompts is None and alone:
        raise UserError(
            f"{name}: captions must be a text, a list of texts, or an object with one of {', '.join(CAPTION_KEYS)}; "
            f"a prompt that is itself JSON is written in {Path(name).stem}.txt"
        )
    return prompts or ()


def captions_of(value: Any) -> tuple[str, ...] | None:
    """Return the captions in a value: a text, an object (one caption in JSON), or a list of them; None if neither."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | dict) for one in values):
        return None
    return _stripped([one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values])


def _stripped(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip()) or ("",)
