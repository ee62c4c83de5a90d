"""Settings as text: quoted for Hydra's command line and for Markdown, by flat keys, and for other people to read."""

import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from foundation.errors import printable, without_credentials
from foundation.settings import text_kind

QUOTES = ("'", '"')
# Settings of one text or several, of which `[draft]` is one.
PROMPTS = ("prompt", "data.control.prompts", "data.swap.prompts")
# An item in a list of prompts.
ITEM = r"""\s*("(?:[^"\\]|\\[\s\S])*"|'(?:[^'\\]|\\[\s\S])*'|[^\s,\[\]"'][^,\[\]]*)\s*"""
# Settings whose values are masked.
SECRET = re.compile(r"token(?!s)|secret|password|passwd|api_?key|auth|credential|\bnotify\b", re.IGNORECASE)


def program(script: str) -> str:
    """Return the command that runs train.py or predict.py: its installed name, or in a clone the file."""
    in_clone = (Path(__file__).parents[1] / "pyproject.toml").is_file()
    return f"python {script}.py" if in_clone and "retouch-" not in Path(sys.argv[0]).name else f"retouch-{script}"


def key_of(setting: str) -> str:
    """Return the key of KEY=VALUE as Hydra reads it: without +, ++, ~ and @PACKAGE."""
    return re.split("[=@]", setting)[0].strip().lstrip("+~").strip()


def has_secret(key: str, value: Any = "") -> bool:
    """Return whether a key, or the key of a text within its value, names a secret."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    named = bool(SECRET.search(key)) and not isinstance(value, int | float)
    return named or any(has_secret(f"{name}", one) for name, one in items)


def prompt_items(value: str) -> list[str]:
    """Return the items of a list of prompts as they are written; none for one text, such as `[draft]`."""
    items = re.findall(ITEM, value[1:-1]) if re.fullmatch(rf"\[{ITEM}(,{ITEM})*\]", value) else []
    return items if len(items) > 1 or (items and items[0][0] in QUOTES) else []


def is_parsed(key: str, value: str) -> bool:
    """Return whether Hydra must parse a value: null, lists, quotes around these or a path, and paths for a sweep."""
    ends = value[0] + value[-1] if len(value) > 1 else ""
    if value in ("", "null", "[]") or (key in PROMPTS and prompt_items(value)):
        return True
    if text_kind(key) == "path" or ends not in ("''", '""'):
        return text_kind(key) == "path" and (ends in ("''", '""', "[]") or ("," in value and not Path(value).exists()))
    with suppress(HydraException):
        return is_parsed(key, str(OverridesParser.create().parse_override(f"x={value}").value()))
    return False


def literal(value: str) -> str:
    """Quote a value so that Hydra reads it back letter for letter."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # a backslash before it would undo the next one
    return QuotedString(escaped, Quote.double).with_quotes()


def argument(key: str, value: Any) -> str:
    """Return KEY=VALUE, which `cli.arguments.quote_values` and Hydra read back as this value."""
    if isinstance(value, list):
        items = ",".join(literal(one) if text_kind(key) else str(one) for one in value)
        return f"{key}=[{items}]" if len(value) > 1 else argument(key, value[0])
    text = str(value)
    if isinstance(value, str) and (is_parsed(key, text) or (text_kind(key) == "path" and text.startswith("~"))):
        text = literal(text)
    return f"{key}={text}"


def override(key: str, value: Any) -> str:
    """Return `argument` for a shell."""
    return f"{key}={shlex.quote(argument(key, value).removeprefix(f'{key}='))}"


def portable_path(path: str) -> str:
    """Return a path relative to the working directory, or PATH_TO/NAME to fill in for a path outside of it."""
    full = Path(path).expanduser()
    if not full.is_absolute():
        return path
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else f"PATH_TO/{full.name}"


def shareable(settings: Any) -> Any:
    """Return settings for others to read: secrets by name are masked, and texts are `without_secrets`."""
    if isinstance(settings, Mapping):
        return {
            key: "***" if has_secret(str(key)) and value and not isinstance(value, Mapping) else shareable(value)
            for key, value in settings.items()
        }
    if isinstance(settings, list | tuple):
        return [shareable(value) for value in settings]
    return without_secrets(settings) if isinstance(settings, str) else settings


def without_secrets(text: str) -> str:
    """Remove folders of this machine, tokens, and credentials in URLs from a text."""
    if re.match(r"(~|/|[A-Za-z]:[/\\])[^\n]*$", text):  # only a path, which may contain spaces
        return ".../" + re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    text = re.sub(r"\bfile://\S*/", "file://.../", text)
    text = without_credentials(text)
    return re.sub(r"(?<![\w:/.}$])(?:~\w*|[A-Za-z]:)?[/\\](?:[^\s'\",\]/\\]+[/\\])+([^\s'\",\]/\\]+)", r".../\1", text)


def one_line(text: str) -> str:
    """Return a text of the data as one line that others may read."""
    return without_secrets(printable(" ".join(text.split())))


def code(text: str) -> str:
    """Quote a text as inline code of Markdown."""
    ticks = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    blank = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{blank}{text}{blank}{ticks}"


def plain(text: str) -> str:
    """Escape the characters with a meaning in Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>#|~&!])", r"\\\1", text)
