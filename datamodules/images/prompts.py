"""The captions of a picture: one or several, in a text or a JSON file beside it or in a table."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.errors import UserError
from datamodules.files import read_text

# Under which an object of a JSON file has its captions.
KEYS = ("captions", "caption", "prompt")


def read_prompts(picture: Path) -> tuple[str, ...]:
    """The captions in `X.txt`, a line each, or else in `X.json`; none if there is no such file.

    Raises:
        UserError: the file cannot be read.
    """
    text, data = picture.with_suffix(".txt"), picture.with_suffix(".json")
    if os.path.lexists(text):
        return lines_of(read_text(text))
    return json_prompts(read_text(data), data) if os.path.lexists(data) else ()


def has_prompts(picture: Path) -> bool:
    """Whether a file with captions stands beside a picture."""
    return any(os.path.lexists(picture.with_suffix(suffix)) for suffix in (".txt", ".json"))


def lines_of(text: str) -> tuple[str, ...]:
    """Each line that is not empty; the empty caption where there is none."""
    return as_prompts(text.splitlines())


def json_prompts(text: str, place: str | Path) -> tuple[str, ...]:
    """The captions of a JSON file; none if it is an object about something else.

    Raises:
        UserError: it is no JSON, or its captions are no text.
    """
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {getattr(error, 'msg', error)}") from error
    if isinstance(value, dict):
        value = next((value[key] for key in KEYS if key in value), None)
        if value is None:
            return ()
    if not is_text(value):
        raise UserError(f"{place}: captions are a text, a list of texts, or an object with one of {', '.join(KEYS)}")
    return as_prompts(value)


def is_text(value: Any) -> bool:
    """Whether it is a text, or a list of texts."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def as_prompts(value: str | Sequence[str]) -> tuple[str, ...]:
    """One text or several, stripped; empty ones count only where there is no other."""
    texts = [value] if isinstance(value, str) else value
    return tuple(text.strip() for text in texts if text.strip()) or ("",)
