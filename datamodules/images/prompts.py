"""The captions of an image: one or several, in a text or a JSON file next to it or in a table."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.errors import UserError
from datamodules.files import read_text
from datamodules.images.folders import CAPTION_SUFFIXES

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
