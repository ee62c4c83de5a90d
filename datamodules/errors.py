"""Mistakes that the person at the keyboard can mend, and what their lines may show."""

import re


class UserError(Exception):
    """A mistake that the person at the keyboard can mend: one line that says what, where and what to do.

    train.py and predict.py print it without a traceback and leave with exit status 1.
    """


def listing(names: list[str], shown: int = 3) -> str:
    """The first few names, the rest counted: `a, b, c and 12 more`."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


# Bytes that are no UTF-8 (as Python names them), line ends, and what moves a terminal's cursor.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """What may be a file's name, for one line of a terminal or a file."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def without_credentials(text: str) -> str:
    """A text with what opens a door masked: passwords and queries of addresses, tokens, keys."""
    text = re.sub(r"(?i)\b(bearer|basic) [\w+/=.~-]{16,}", r"\1 ***", text)
    text = re.sub(r"\b(hf_\w{8,}|A[KS]IA\w{12,}|gh[pousr]_\w{20,})", "***", text)
    text = re.sub(r"\b(?!abfss?:)(\w+://)[^/\s]*@", r"\1***@", text)
    return re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]+", r"\1?***", text)
