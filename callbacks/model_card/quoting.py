"""Texts of any kind in Markdown, which must stay texts."""

import re

from callbacks.report.page import without_secrets
from datamodules.errors import printable


def one_line(text: str) -> str:
    """A text of the data in one line that others may read."""
    return without_secrets(printable(" ".join(text.split())))


def code(text: str) -> str:
    """As code within a line; nothing in it means anything."""
    ticks = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    blank = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{blank}{text}{blank}{ticks}"


def block(text: str, language: str) -> str:
    """As lines of code; what stands in them has been made one line each."""
    return f"```{language}\n{text}\n```"


def plain(text: str) -> str:
    """As words: what means something in Markdown or HTML is escaped."""
    return re.sub(r"([\\`*_\[\]<>#|~&!])", r"\\\1", text)
