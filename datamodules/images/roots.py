"""data.root and data.val_root: the roots that they name, with the settings of each."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datamodules.errors import UserError, listing, printable
from datamodules.images.folders import nfc
from datamodules.images.sample import Alpha, Found, Root
from datamodules.images.transforms import SIDE_MULTIPLE

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
