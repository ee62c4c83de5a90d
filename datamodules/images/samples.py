"""Samples: their images and captions, and the settings of the root that holds them."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from datamodules.images.recipes import RECIPES, Chain, as_chain, as_texts
from foundation.errors import UserError, listing, printable
from foundation.files import Packed, file_signature
from foundation.settings import Rule, declared

# Both sides of every image are at least this long.
SIDE_MULTIPLE = 16
# Matched in any case. The first is the one captions are written to; when several exist, they are read in this order.
CAPTION_SUFFIXES = (".txt", ".caption", ".json")
# Placeholder for the trigger word in a caption.
TRIGGER = "[trigger]"
# An epoch is a list of draws, so repeats cost memory.
MOST_REPEATS = 10_000
# An image file, or one packed in a tar or a table.
ImageFile = Path | Packed
RootSetting = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None


def nfc(name: str) -> str:
    """Return the name in composed Unicode; macOS may write accents as separate characters."""
    return unicodedata.normalize("NFC", name)


@dataclass(frozen=True)
class Alpha(Packed):
    """The alpha channel of an image as a mask: 1 where it is opaque."""

    image: ImageFile

    def read_bytes(self) -> bytes:
        return self.image.read_bytes()

    def signature(self) -> tuple[str, int, int, int]:
        name, size, modified, changed = file_signature(self.image)
        return f"{name}#alpha", size, modified, changed

    def __str__(self) -> str:
        return str(self.image)


@dataclass(frozen=True)
class Slice(Packed):
    """An image in a larger file: a member of an uncompressed tar.

    Attributes:
        name: its name in messages; not its identity, since a root can be spelled in several ways.
        file: path of the file, without links.
        offset, size: in bytes.
    """

    name: str = field(compare=False)
    file: str
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise EOFError(f"{self.file} ends early")
        return content

    def signature(self) -> tuple[str, int, int, int]:
        _, size, modified, changed = file_signature(Path(self.file))
        return f"{self.file}#{self.offset}.{self.size}", size, modified, changed

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Root:
    """An entry of data.root with the settings of its samples.

    Attributes:
        path: a folder, a table, tars or `hf://owner/name`.
        repeats: times that an epoch draws each sample.
        weight: weight of its samples in the loss.
        resolution: sides of squares; each image is shrunk to the area of each. Empty: its own size.
        prefix: text put before each caption.
        trigger_word: replaces [trigger] in captions; prepended to captions with neither.
        columns: column names of a table by role.
        pair_suffixes: endings of the names of controls and targets in one folder.
        caption_per_line: treat each line of a text file as a caption, not the whole file.
        alpha_mask: use the alpha channel of targets as the mask of the loss.
        control: recipes that make the condition image of each sample; None for none.
        swap: share of the samples that are trained from target to control.
        swap_prompts: their instructions, unless they have their own.
        require_prompt: treat a sample without a caption as incomplete. Not a setting.
        others: paths of all roots, whose files are theirs. Not a setting.
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
    control: Chain | None = None
    swap: float = 0.0
    swap_prompts: tuple[str, ...] = ()
    require_prompt: bool = True
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the path, with repeats and weight where they are not 1."""
        counts = [f"repeats {self.repeats}"] if self.repeats != 1 else []
        counts += [f"weight {self.weight:g}"] if self.weight != 1 else []
        return f"{self.path} ({', '.join(counts)})" if counts else str(self.path)


@dataclass(frozen=True)
class Sample:
    """A sample: images and captions.

    Attributes:
        key: path of the target in its root without suffix; unique over all roots, valid UTF-8.
        target: the image to learn.
        controls: condition images.
        prompts: instructions or captions, of which one is drawn each time; at least one where its root requires it.
        swap_prompts: instructions from the target to the first condition image.
        mask: weight of each pixel in the loss.
        rejected: an image of the target's size that is preferred less (objective=dpo).
        root: index of its root.
        caption_file: text file that holds its prompts, or would; None in a table.
        mask_file: image file that holds its mask, or would; None in a table.
    """

    key: str
    target: ImageFile
    controls: tuple[ImageFile, ...]
    prompts: tuple[str, ...]
    mask: ImageFile | None = None
    rejected: ImageFile | None = None
    root: int = 0
    caption_file: Path | None = None
    mask_file: Path | None = None
    swap_prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """The result of a scan.

    Attributes:
        samples: the complete samples.
        incomplete: a line about each incomplete one.
        notes: a line about each thing that was found and not read.
        form: `columns` or `pair_suffixes` if this setting applies to the root, else "".
        without_controls: the error if no sample of the data set has a condition image; "" if none need have one.
    """

    samples: list[Sample]
    incomplete: list[str]
    notes: tuple[str, ...] = ()
    form: str = ""
    without_controls: str = ""

    def plus(self, other: "Found") -> "Found":
        lists = self.samples + other.samples, self.incomplete + other.incomplete, self.notes + other.notes
        return Found(*lists, without_controls=self.without_controls)


# A function that finds the samples of some roots.
Source = Callable[[list[Root]], Found]


# Settings of roots.


# Settings of a root, and the rules of those that conf/ does not declare for all roots.
GROUPED = ("control", "swap")
ROOT_SETTINGS = (
    *("repeats", "weight", "resolution", "prefix", "trigger_word", "columns", "pair_suffixes"),
    *("caption_per_line", "alpha_mask", *GROUPED),
)
ROOT_RULES = {"repeats": Rule.parse(f"int >= 1, <= {MOST_REPEATS}"), "weight": Rule.parse("float >= 0")}


def _are_suffixes(value: Any) -> bool:
    ends = list(value) if isinstance(value, list | tuple) else [] if value is None else [None]
    return not ends or (len(set(ends)) == len(ends) == 2 and all(isinstance(end, str) for end in ends))


def _require(place: str, key: str, value: Any) -> None:
    """Raise a UserError for a value that a setting of a root may not have."""
    rule = ROOT_RULES.get(key) or declared("train").settings[f"data.{key}"].rule
    if rule is not None and not rule.allows(value):
        raise UserError(f"{place}={value}: must be {rule}")


def as_roots(name: str, value: RootSetting, settings: Mapping[str, Any]) -> list[Root]:
    """Return one root or several as a list; `settings` apply to roots that do not set their own.

    Raises:
        UserError: a setting is unknown or has a wrong value, or a path is not UTF-8.
    """
    entries = value if isinstance(value, list | tuple) else [value]
    return [_as_root(name, one, settings) for one in entries if one not in (None, "")]


def _as_root(name: str, value: Any, settings: Mapping[str, Any]) -> Root:
    own = dict(value) if isinstance(value, Mapping) else {"path": value}
    if unknown := [str(key) for key in own if key not in ROOT_SETTINGS and key != "path"]:
        raise UserError(
            f"data.{name}: a root has no setting {listing(unknown)}; choose from path, {', '.join(ROOT_SETTINGS)}"
        )
    path = str(own.get("path") or "")
    if not path:
        raise UserError(f"data.{name}={own}: the path is missing. Write {{path: FOLDER, repeats: 2}}")
    if printable(path) != path:
        raise UserError(f"data.{name}={printable(path)}: the name is not UTF-8: rename it, or give a link to it")
    places = {key: f"data.{name}={path}: {key}" if key in own else f"data.{key}" for key in ROOT_SETTINGS}
    chosen = {
        key: _group(places[key], key, value, settings) for key, value in {**settings, **own}.items() if key != "path"
    }
    sides, ends = chosen.get("resolution"), chosen.get("pair_suffixes")
    if not _are_suffixes(ends):
        raise UserError(f"{places['pair_suffixes']}={ends}: must be two different endings, as [_before,_after]")
    chosen["resolution"] = tuple(dict.fromkeys([] if sides is None else [sides] if isinstance(sides, int) else sides))
    chosen["columns"] = chosen.get("columns") or {}
    chosen["pair_suffixes"] = tuple(map(nfc, ends)) if ends else None
    chosen["control"] = as_chain(places["control"], **chosen["control"]) if chosen.get("control") else None
    swap = chosen.get("swap") or {"share": 0, "prompts": ()}
    chosen |= {"swap": float(swap["share"]), "swap_prompts": as_texts(swap["prompts"])}
    return Root(**{**chosen, "path": path})


def _group(place: str, key: str, value: Any, settings: Mapping[str, Any]) -> Any:
    """Return the value of a setting, checked; of a group of settings, all of them, where a root may give only some.

    Any other value is the value of the group's first setting.
    """
    if key not in GROUPED:
        _require(place, key, value)
        return value
    if not (usual := settings.get(key)):  # ~data.control, or null in a file
        if value is not None:
            raise UserError(f"{place}={value}: data.{key} is removed. Leave ~data.{key} or its null out.")
        return None
    is_group = isinstance(value, Mapping) and bool(value) and not any(one in RECIPES for one in value)
    own = value if is_group else {next(iter(usual)): value}
    if unknown := own.keys() - usual.keys():
        raise UserError(f"{place}: there is no {listing(sorted(unknown))}. Choose {', '.join(usual)}.")
    for name, one in own.items():
        _require(f"{place}.{name}", f"{key}.{name}", one)
    return {**usual, **own}


def with_settings(found: Found, roots: Sequence[Root]) -> Found:
    """Apply the settings of roots to their samples: prefixes and trigger words of captions, alpha channels as masks.

    Raises:
        UserError: data.alpha_mask is set for a sample with a mask of its own.
    """
    if both := [one.key for one in found.samples if one.mask is not None and roots[one.root].alpha_mask]:
        raise UserError(f"data.alpha_mask=true: {listing(both)} have masks of their own. Remove those, or leave it out")
    samples = [
        replace(
            one,
            prompts=tuple(with_words(prompt, roots[one.root]) for prompt in one.prompts),
            mask=Alpha(one.target) if roots[one.root].alpha_mask else one.mask,
        )
        for one in found.samples
    ]
    return replace(found, samples=samples)


def with_words(prompt: str, root: Root) -> str:
    """Return a caption with the prefix and the trigger word of its root."""
    word, prompt = root.trigger_word, root.prefix + prompt
    if word is not None and TRIGGER in prompt:
        prompt = prompt.replace(TRIGGER, word)
    elif word and not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", prompt):
        prompt = f"{word}, {prompt}" if prompt else word
    return prompt
