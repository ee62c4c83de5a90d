"""Text that others may read."""

import re


def without_credentials(text: str) -> str:
    """A text with what opens a door masked: passwords and queries of addresses, tokens, keys."""
    text = re.sub(r"(?i)\b(bearer|basic) [\w+/=.~-]{16,}", r"\1 ***", text)
    text = re.sub(r"\b(hf_\w{8,}|A[KS]IA\w{12,}|gh[pousr]_\w{20,})", "***", text)
    text = re.sub(r"\b(?!abfss?:)(\w+://)[^/\s]*@", r"\1***@", text)
    return re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]+", r"\1?***", text)
