"""Errors that the user can fix, and the parts of their messages."""

import re


class UserError(Exception):
    """An error that the user can fix: one line with the problem, its place and the fix.

    train.py and predict.py print it without a traceback and exit with status 1.
    """


def listing(names: list[str], shown: int = 3) -> str:
    """Return the first few names and the number of the others: `a, b, c and 12 more`."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def count_of(count: int, plural: str) -> str:
    """Return a number with its noun: `3 pairs have`, `1 pair has`."""
    if count != 1:
        return f"{count:,} {plural}"
    noun, *rest = plural.split(" ")
    verbs = {"have": "has", "are": "is"}
    return " ".join(["1", noun.removesuffix("s"), *(verbs.get(word, word) for word in rest)])


# Bytes that are not UTF-8 (surrogates in Python), line ends, control characters of terminals, and marks that reorder.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, kept: str = "") -> str:
    """Return a text that may contain any bytes, such as a file's name, as part of one line; some may be `kept`."""
    return UNPRINTABLE.sub(lambda one: one[0] if one[0] in kept else one[0].encode("unicode_escape").decode(), text)


def without_credentials(text: str) -> str:
    """Mask the credentials in a text: passwords and queries of URLs, tokens, keys."""
    text = re.sub(r"(?i)\b(bearer|basic) [\w+/=.~-]{16,}", r"\1 ***", text)
    text = re.sub(r"\b(hf_\w{8,}|A[KS]IA\w{12,}|gh[pousr]_\w{20,})", "***", text)
    text = re.sub(r"\b(?!abfss?:)(\w+://)[^/\s]*@", r"\1***@", text)
    return re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]+", r"\1?***", text)
