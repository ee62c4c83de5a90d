"""Texts of any kind in Markdown, which must stay texts."""

import re

from callbacks.report.page import without_secrets
from datamodules.errors import printable


def one_line(text: str) -> str:
    """A text of the data in one line that others may read."""
    return without_secrets(printable(" ".join(text.split())))


def code(text: str) -> str:
    """As code within a line; nothing in it means anything."""
    ticks = "`" * (_longest(text) + 1)
    blank = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{blank}{text}{blank}{ticks}"


def block(text: str, language: str = "") -> str:
    """As lines of code."""
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def plain(text: str) -> str:
    """As words: what means something in Markdown or HTML is escaped."""
    return re.sub(r"([\\`*_\[\]<>#|~&!])", r"\\\1", text)


def _longest(text: str) -> int:
    """Of the runs of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
