"""What a source of samples gives: samples, whose pictures are files or stand inside of larger files."""

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing, printable
from datamodules.files import Packed, file_signature, read_text

SIDE_MULTIPLE = 16

# In any case, as .TXT; the first is where captions are written.
CAPTION_SUFFIXES = (".txt", ".caption", ".json")


# Where the bytes of a picture are.
Picture = Path | Packed


@dataclass(frozen=True)
class Alpha(Packed):
    """The alpha channel of a picture, as a mask: 1 where it is opaque."""

    picture: Picture

    def read(self) -> bytes:
        return self.picture.read_bytes() if isinstance(self.picture, Path) else self.picture.read()

    def signature(self) -> tuple[str, int, int, int]:
        name, size, modified, changed = file_signature(self.picture)
        return f"{name}#alpha", size, modified, changed

    @property
    def stem(self) -> str:
        return self.picture.stem

    def __str__(self) -> str:
        return str(self.picture)


# What the settings of single forms are about.
FORMS = {"columns": "tables, data sets and tars, which have columns", "pair_suffixes": "pairs in one folder"}


def place(picture: Picture) -> Picture:
    """One name for all names of a picture."""
    return picture.resolve() if isinstance(picture, Path) else picture


@dataclass(frozen=True)
class Root:
    """One of data.root, with the settings of its samples; those that it does not set are data's.

    Attributes:
        path: a folder, a table, `hf://owner/name`, ...
        repeats: how often an epoch has each of its samples.
        weight: of its samples in the loss.
        resolution: sides of the squares whose areas its pictures are shrunk to, each sample to each; empty for its own
            size.
        prefix: stands before its captions.
        trigger_word: replaces [trigger] in its captions, and stands before those that have neither.
        columns: for tables, which of their columns is what.
        pair_suffixes: how the file names of the controls and the targets of one folder end.
        caption_per_line: whether each line of a text file is a caption, else the whole file is one.
        alpha_mask: whether the alpha channels of its targets are the masks of their losses.
        require_prompt: whether a sample without caption is incomplete, or is one with no prompts; no setting.
    """

    path: str | Path
    repeats: int = 1
    weight: float = 1.0
    resolution: tuple[int, ...] = ()
    prefix: str = ""
    trigger_word: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    pair_suffixes: tuple[str, str] | None = None
    caption_per_line: bool = True
    alpha_mask: bool = False
    require_prompt: bool = True

    def __str__(self) -> str:
        """Its path, with what makes its samples count more or less than those of others."""
        counts = [f"repeats {self.repeats}"] if self.repeats != 1 else []
        counts += [f"weight {self.weight:g}"] if self.weight != 1 else []
        return f"{self.path} ({', '.join(counts)})" if counts else str(self.path)


@dataclass(frozen=True)
class Sample:
    """The pictures and the captions of one sample.

    Attributes:
        key: the target's path in its root without suffix; unique over all roots, in valid UTF-8.
        target: the picture to learn.
        controls: the condition images to start from.
        prompts: instructions or captions, at least one where its root requires it; each time one of them is drawn.
        mask: the weight of each pixel in the loss.
        rejected: of the target's size, what is to be liked less than it; only preferences are learned from it.
        root: the number of its root.
        caption_file: a text file of its own, where its prompts stand or would; None where they stand in a table.
    """

    key: str
    target: Picture
    controls: tuple[Picture, ...]
    prompts: tuple[str, ...]
    mask: Picture | None = None
    rejected: Picture | None = None
    root: int = 0
    caption_file: Path | None = None


@dataclass(frozen=True)
class Found:
    """The result of a scan: the complete samples, and a line about each incomplete one.

    Attributes:
        passed_over: how many files that are no pictures of anybody (hidden, Thumbs.db, __MACOSX) were left out.
        forms: of each root, the setting that its form needs to know more: `columns`, `pair_suffixes`, or none.
        notes: a line about each thing that was found and not read.
    """

    samples: list[Sample]
    incomplete: list[str]
    passed_over: int = 0
    forms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# Finds the samples of some roots.
Source = Callable[[list[Root]], Found]


def scan_roots(roots: Iterable[Root], scan: Callable[[Root], Found]) -> Found:
    """What `scan` finds in all roots, with keys that are unique over them."""
    roots = list(roots)
    samples: list[Sample] = []
    incomplete: list[str] = []
    passed_over = 0
    forms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen: Counter[str] = Counter()
    for number, root in enumerate(roots):
        found = scan(root)
        prefix = "" if len(roots) == 1 else f"{root.path}/"
        for sample in found.samples:
            key = printable(prefix + sample.key)
            seen[key] += 1  # above 1 if a root is named twice
            samples.append(replace(sample, key=key if seen[key] == 1 else f"{key}#{seen[key]}", root=number))
        incomplete += map(printable, found.incomplete)
        passed_over += found.passed_over
        forms += found.forms or ("",)
        notes += tuple(map(printable, found.notes))
    return Found(samples, incomplete, passed_over, forms, notes)


def refuse_unused(roots: Sequence[Root], forms: Sequence[str]) -> None:
    """Raise a UserError where no root has the form that data.columns or data.pair_suffixes is about.

    What is set for all roots is used by those of its form; what one has for itself has to be of its form.

    Args:
        forms: of each root, as in `Found`.
    """
    for setting, what in FORMS.items():
        given = [(getattr(root, setting), root.path, form) for root, form in zip(roots, forms, strict=False)]
        for value in [value for value, *_ in given if value]:
            those = [(path, form) for other, path, form in given if other == value]
            if all(form != setting for _, form in those):
                text = f"[{','.join(value)}]" if isinstance(value, tuple) else dict(value)
                paths = listing([str(path) for path, _ in those])
                raise UserError(f"data.{setting}={text} is for {what}, and {paths} has none: leave it out")


# Under which an object of a JSON file has its captions.
KEYS = ("captions", "caption", "prompt")


class TextFile(str):
    """The content of a text file with captions, inside of a larger file."""


def read_prompts(files: Sequence[Path], per_line: bool = True) -> tuple[tuple[str, ...], Path | None]:
    """Return the captions of an image, and the first of `files` that holds them; none if no file does.

    Args:
        files: X.txt, X.caption, X.json, of which any may be missing.
        per_line: whether each line of a text is a caption of its own.

    Raises:
        UserError: a file cannot be read, or two files differ.
    """
    found: dict[Path, tuple[str, ...]] = {}
    for suffix in CAPTION_SUFFIXES:
        for path in (one for one in files if one.suffix.lower() == suffix):
            text = read_text(path)
            alone = not found
            prompts = json_prompts(text, path, alone) if suffix == ".json" else text_prompts(text, per_line)
            found |= {path: prompts} if prompts else {}
    if len({tuple(" ".join(prompts).split()) for prompts in found.values()}) > 1:
        raise UserError(f"{' and '.join(map(str, found))} hold different captions of one image. Keep one")
    return next(((prompts, path) for path, prompts in found.items()), ((), None))


def lines_of(text: str) -> list[str]:
    """Split at the ends of lines of Unix, Windows and old Macs, and at none of Unicode's other separators."""
    return re.split("\r\n?|\n", text)


def text_prompts(text: str, per_line: bool = True) -> tuple[str, ...]:
    """Return each line that is not empty, or all of the text if it is JSON; the empty caption if there is none."""
    lines = lines_of(text)
    return as_prompts(lines if per_line and not is_json(text) else "\n".join(lines))


def is_json(text: str) -> bool:
    """Whether a text is an object or an array of JSON."""
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


def json_prompts(text: str, place: str | Path, alone: bool = True) -> tuple[str, ...]:
    """Return the captions of a JSON file; none if it is an object about something else.

    Args:
        alone: whether no other file holds captions of the image: then an object of several words is itself one.

    Raises:
        UserError: it is no JSON, or holds no captions.
    """
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {getattr(error, 'msg', error)}") from error
    if isinstance(value, dict):
        key = next((key for key in KEYS if key in value), None)
        if key is None:
            return (text.strip(),) if alone and len(_words(value)) > 1 else ()
        if (value := value[key]) is None:
            return ()
    prompts = captions_of(value)
    if prompts is None and alone:
        raise UserError(f"{place}: captions are a text, a list of texts, or an object with one of {', '.join(KEYS)}")
    return prompts or ()


def _words(value: Any) -> list[str]:
    """Return the words of all texts in a JSON value, without the names of its keys."""
    words, values = [], [value]
    while values:
        one = values.pop()
        words += one.split() if isinstance(one, str) else []
        values += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
    return words


def is_text(value: Any) -> bool:
    """Whether it is a text, or a list of texts."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def captions_of(value: Any) -> tuple[str, ...] | None:
    """Return the captions that a value holds: a text or an object, which is one caption in JSON, or a list of them."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | dict) for one in values):
        return None
    return as_prompts([one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values])


def as_prompts(value: str | Sequence[str]) -> tuple[str, ...]:
    """One text or several, stripped; empty ones count only where there is no other."""
    texts = [value] if isinstance(value, str) else value
    return tuple(text.strip() for text in texts if text.strip()) or ("",)


RootSetting = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
# What a trigger word replaces in a caption.
TRIGGER = "[trigger]"
# Beyond it a training step would take hundreds of gigabytes.
LONGEST_SIDE = 4096
# An epoch is a list of what it draws.
MOST_REPEATS = 10_000


def _is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _are_sides(value: Any) -> bool:
    sides = value if isinstance(value, list | tuple) else [value]
    return value is None or (bool(sides) and all(_is_whole(side, SIDE_MULTIPLE, LONGEST_SIDE) for side in sides))


def _are_suffixes(value: Any) -> bool:
    ends = list(value) if isinstance(value, list | tuple) else [] if value is None else [None]
    return not ends or (len(set(ends)) == len(ends) == 2 and all(isinstance(end, str) for end in ends))


# What a setting of a root may be.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "repeats": (lambda value: _is_whole(value, 1, MOST_REPEATS), f"a whole number from 1 to {MOST_REPEATS}"),
    "weight": (_is_weight, "a number from 0 on"),
    "resolution": (_are_sides, f"a whole number from {SIDE_MULTIPLE} to {LONGEST_SIDE}, a list of them, or null"),
    "prefix": (lambda value: isinstance(value, str), "text"),
    "trigger_word": (lambda value: value is None or isinstance(value, str), "text or null"),
    "columns": (lambda value: value is None or isinstance(value, Mapping), "as {control: photo, target: graded}"),
    "pair_suffixes": (_are_suffixes, "two different endings, as [_before,_after]"),
    **dict.fromkeys(("caption_per_line", "alpha_mask"), (lambda value: isinstance(value, bool), "true or false")),
}


def as_roots(name: str, value: RootSetting, settings: Mapping[str, Any]) -> list[Root]:
    """One root or several as a list.

    Raises:
        UserError: a setting is unknown or no such value; or a name is not UTF-8, as the run's files are.
    """
    for key, (allows, what) in RULES.items():
        if key in settings and not allows(settings[key]):
            raise UserError(f"data.{key}={settings[key]}: must be {what}")
    entries = value if isinstance(value, list | tuple) else [value]
    return [_as_root(name, one, settings) for one in entries if one not in (None, "")]


def _as_root(name: str, value: Any, settings: Mapping[str, Any]) -> Root:
    own = dict(value) if isinstance(value, Mapping) else {"path": value}
    if unknown := [str(key) for key in own if key not in RULES and key != "path"]:
        raise UserError(f"data.{name}: a root has no setting {listing(unknown)}; choose from path, {', '.join(RULES)}")
    path = str(own.get("path") or "")
    if not path:
        raise UserError(f"data.{name}={own}: say where it is, as {{path: FOLDER, repeats: 2}}")
    if printable(path) != path:
        raise UserError(f"data.{name}={printable(path)}: the name is not UTF-8: rename it, or give a link to it")
    for key, (allows, what) in RULES.items():
        if key in own and not allows(own[key]):
            raise UserError(f"data.{name}={path}: {key}={own[key]}: must be {what}")
    chosen = {**settings, **own, "path": path}
    sides, ends = chosen.get("resolution"), chosen.get("pair_suffixes")
    chosen["resolution"] = tuple(dict.fromkeys([] if sides is None else [sides] if isinstance(sides, int) else sides))
    chosen["columns"] = chosen.get("columns") or {}
    chosen["pair_suffixes"] = tuple(map(nfc, ends)) if ends else None
    return Root(**chosen)


def with_settings(found: Found, roots: Sequence[Root]) -> Found:
    """Apply the settings of these roots to their samples: captions as the model will read them, masks.

    Raises:
        UserError: data.alpha_mask is set for a sample with a mask of its own.
    """
    if both := [one.key for one in found.samples if one.mask is not None and roots[one.root].alpha_mask]:
        raise UserError(f"data.alpha_mask=true: {listing(both)} have masks of their own. Remove those, or leave it out")
    samples = [
        replace(
            one,
            prompts=tuple(_caption(prompt, roots[one.root]) for prompt in one.prompts),
            mask=Alpha(one.target) if roots[one.root].alpha_mask else one.mask,
        )
        for one in found.samples
    ]
    return replace(found, samples=samples)


def _caption(prompt: str, root: Root) -> str:
    """A caption as the model will read it, by the settings of its root."""
    word, prompt = root.trigger_word, root.prefix + prompt
    if word is not None and TRIGGER in prompt:
        prompt = prompt.replace(TRIGGER, word)
    elif word and not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt):
        prompt = f"{word}, {prompt}" if prompt else word
    return prompt


def nfc(name: str) -> str:
    """Return the name in composed Unicode: a Mac may write accents as characters of their own."""
    return unicodedata.normalize("NFC", name)
