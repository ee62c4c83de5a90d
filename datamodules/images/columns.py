"""Which column of a table holds the control, the target, the prompt, the mask: as named, or guessed by its name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.images.folders import IMAGE_SUFFIXES
from datamodules.images.samples import CAPTION_SUFFIXES

# What the columns of a role are called, the likeliest first. "source", "source_image", "source_file_name" and
# "Source Images" are one word.
WORDS = {
    role: tuple(words.split())
    for role, words in {
        "control": "control source src input original before conditioning condition cond reference references ref refs "
        "start",
        "target": "target tgt edited output after result end chosen preferred image images img picture photo file_name "
        "file filename path jpg jpeg png webp",
        "prompt": "txt edit_prompt edit_instruction editing_instruction instruction instructions prompt prompts "
        "captions caption text description edit json",
        "mask": "mask",
        "rejected": "rejected dispreferred",
    }.items()
}
# What messages call a column that is missing, where its name is not known.
NOUNS = {"control": "column of condition images", "target": "column of targets", "prompt": "column of prompts"}
_FILE = re.compile(r"_?(file_?names?|files?|paths?)$")
_PICTURE = re.compile(r"_?(images?|imgs?|pictures?|photos?)$")
_NUMBER = re.compile(r"_?(\d+)$")


@dataclass(frozen=True)
class Columns:
    """The names of a table's columns; `controls` is empty and `prompt` may be None for text to image."""

    target: str
    controls: tuple[str, ...]
    prompt: str | None
    mask: str | None
    rejected: str | None


class MissingColumn(UserError):
    """A column is wanted, and none of those that are there is it."""


def choose_columns(
    place: str,
    there: Sequence[str],
    pictures: Sequence[str],
    given: Mapping[str, Any],
    wanted: Sequence[str],
    usual: Mapping[str, str] | None = None,
) -> Columns:
    """The columns of each role.

    Args:
        place: what messages call the table.
        there: all of its columns.
        pictures: those that hold pictures, among which the others' columns are guessed.
        given: data.columns: for a role its column, for control one or a list.
        wanted: the roles that must have a column; without control, pictures with captions are wanted.
        usual: names that a role's column has in such tables, before any guess.

    Raises:
        MissingColumn: one that is wanted is not there; names those that are.
        UserError: two are as likely, or what is given is no name of a column.
    """
    if unknown := [str(role) for role in given if role not in WORDS]:
        raise UserError(f"data.columns: there is no {listing(unknown)}; choose from {', '.join(WORDS)}")
    named = {role: _named(place, there, role, value) for role, value in given.items() if value not in (None, "", [])}
    usual, taken = usual or {}, [name for names in named.values() for name in names]
    fixed = {role: [name] for role, name in usual.items() if name in there and name not in taken} | named
    if "control" in fixed and "control" not in named:
        fixed["control"] = _numbered(place, there, [one for one in there if _NUMBER.sub("", one) == usual["control"]])
    controls = fixed.get("control") or _guess_controls(place, there, pictures)
    target = fixed.get("target") or _guess(place, "target", [one for one in pictures if one not in controls], there)
    prompt = fixed.get("prompt") or _guess(place, "prompt", there, there)
    mask, rejected = (fixed.get(role) or _guess(place, role, pictures, there) for role in ("mask", "rejected"))
    found = {"target": target, "control": controls, "prompt": prompt}
    if missing := [role for role, columns in found.items() if role in wanted and not columns]:
        nouns = [usual.get(role, NOUNS[role]) for role in missing]
        raise MissingColumn(
            f"{place} has no {listing(nouns)}; its columns are {', '.join(there)}: say "
            f"which, as data.columns='{{{', '.join(f'{role}: NAME' for role in missing)}}}'"
        )
    edits = "control" in wanted
    if not edits and controls and "target" not in named:
        raise UserError(
            f"{place} is a set of pairs, for data=cached and a model that edits; data=captions takes pictures alone: "
            f"say which, as data.columns='{{target: {target[0]}}}'"
        )
    optional = (next(iter(columns), None) for columns in (prompt, mask, rejected))
    return Columns(target[0], tuple(controls) if edits else (), *optional)


def is_optional(name: str) -> bool:
    """Whether a column is called one of masks or of rejected pictures."""
    return any(_word(name, role) in WORDS[role] for role in ("mask", "rejected"))


def _named(place: str, there: Sequence[str], role: str, value: Any) -> list[str]:
    """The columns that the user names for a role."""
    names = list(value) if isinstance(value, list | tuple) else [value]
    if wrong := [str(name) for name in names if not isinstance(name, str)]:
        raise UserError(f"data.columns.{role}={listing(wrong)}: must be the name of a column (a number in quotes)")
    if len(names) > 1 and role != "control":
        raise UserError(f"data.columns.{role}={listing(names)}: one column, only control may have several")
    if absent := [name for name in names if name not in there]:
        raise UserError(
            f"{place} has no column {listing(absent)}, which data.columns names for {role}; its columns are "
            f"{', '.join(there)}"
        )
    return names


def _guess(place: str, role: str, among: Sequence[str], there: Sequence[str]) -> list[str]:
    """The only column of the likeliest word; none if there is no such word."""
    for word in WORDS[role]:
        found = [name for name in among if _word(name, role) == word]
        exact = [name for name in found if name == word]
        if len(exact or found) == 1:
            return exact or found
        if found:
            raise _ambiguous(place, role, found, there)
    return []


def _guess_controls(place: str, there: Sequence[str], among: Sequence[str]) -> list[str]:
    """All columns of the likeliest word, by their numbers: source, source_2, source_3."""
    for word in WORDS["control"]:
        if found := [name for name in among if _word(_unnumbered(name), "control") == word]:
            return _numbered(place, there, found)
    return []


def _numbered(place: str, there: Sequence[str], names: Sequence[str]) -> list[str]:
    """By their numbers; the one without any is the first."""
    found: dict[int, str] = {}
    for name in names:
        number = _NUMBER.search(_plain(name))
        place_in_row = int(number[1]) if number else -1
        if place_in_row in found:
            raise _ambiguous(place, "control", [found[place_in_row], name], there)
        found[place_in_row] = name
    return [found[number] for number in sorted(found)]


def _unnumbered(name: str) -> str:
    return _NUMBER.sub("", _plain(name))


def _ambiguous(place: str, role: str, found: Sequence[str], there: Sequence[str]) -> UserError:
    return UserError(
        f"{place}: {' and '.join(found)} may both be the {role}; its columns are {', '.join(there)}: say which, as "
        f"data.columns='{{{role}: {found[0]}}}'"
    )


def _plain(name: str) -> str:
    """In small letters, without a file's suffix (`source.jpg`, `prompt.txt`, as in tars)."""
    name = name.lower()
    for suffix in (*IMAGE_SUFFIXES, *CAPTION_SUFFIXES):
        name = name.removesuffix(suffix)
    return re.sub(r"[\s.-]+", "_", name)


def _word(name: str, role: str) -> str:
    """A column's name without what it says of files and pictures, if something is left."""
    name = _plain(name)
    for ending in (_FILE, _PICTURE) if role != "prompt" else ():
        name = ending.sub("", name) or name
    return name
