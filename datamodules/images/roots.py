"""data.root and data.val_root: the roots that they name, with the settings of each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from datamodules.errors import UserError, listing, printable
from datamodules.images.sample import Found, Root
from datamodules.images.transforms import SIDE_MULTIPLE

RootSetting = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
# What a trigger word replaces in a caption.
TRIGGER = "[trigger]"
# Of a root: the least, of which kinds, and how the rule is called.
NUMBERS: list[tuple[str, int, Any, str]] = [
    ("repeats", 1, int, "a whole number from 1 on"),
    ("weight", 0, (int, float), "a number from 0 on"),
]


def as_roots(name: str, value: RootSetting, settings: Mapping[str, Any]) -> list[Root]:
    """One root or several as a list.

    Raises:
        UserError: a setting is unknown or no such value; or a name is not UTF-8, as the run's files are.
    """
    entries = [value] if isinstance(value, str | Mapping) else value or []
    return [_as_root(name, one, settings) for one in entries if one not in (None, "")]


def _as_root(name: str, value: str | Mapping[str, Any], settings: Mapping[str, Any]) -> Root:
    own = dict(value) if isinstance(value, Mapping) else {"path": value}
    known = [one.name for one in fields(Root) if one.name != "require_prompt"]
    if unknown := [key for key in own if key not in known]:
        raise UserError(f"data.{name}: a root has no setting {listing(unknown)}; choose from {', '.join(known)}")
    path = str(own.get("path") or "")
    if not path:
        raise UserError(f"data.{name}={own}: say where it is, as {{path: FOLDER, repeats: 2}}")
    if printable(path) != path:
        raise UserError(f"data.{name}={printable(path)}: the name is not UTF-8: rename it, or give a link to it")
    all_settings = {**settings, **own, "path": path}
    for key, least, kinds, what in NUMBERS:
        number = all_settings.get(key, least)
        if isinstance(number, bool) or not isinstance(number, kinds) or not least <= number < math.inf:
            raise UserError(f"data.{name}={path}: {key}={number}: must be {what}")
    sides = all_settings.get("resolution")
    sides = [] if sides is None else [sides] if isinstance(sides, int) else list(sides)
    if not all(isinstance(side, int) and side >= SIDE_MULTIPLE for side in sides):
        raise UserError(f"data.{name}={path}: resolution={sides}: must be whole numbers from {SIDE_MULTIPLE} on")
    all_settings["resolution"] = tuple(dict.fromkeys(sides))
    all_settings["columns"] = all_settings.get("columns") or {}
    return Root(**all_settings)


def with_captions(found: Found, roots: Sequence[Root]) -> Found:
    """The samples of these roots with their captions as the model will read them."""
    samples = [
        replace(one, prompts=tuple(_caption(prompt, roots[one.root]) for prompt in one.prompts))
        for one in found.samples
    ]
    return replace(found, samples=samples)


def _caption(prompt: str, root: Root) -> str:
    """A caption as the model will read it, by the settings of its root."""
    word = root.trigger_word
    if word is not None and TRIGGER in prompt:
        prompt = prompt.replace(TRIGGER, word)
    elif word is not None and word not in prompt:
        prompt = f"{word}, {prompt}" if prompt else word
    return root.prefix + prompt
