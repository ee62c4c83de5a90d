class UserError(Exception):
    """A mistake that the person at the keyboard can mend: one line that says what, where and what to do.

    train.py and predict.py print it without a traceback and leave with exit status 1.
    """


def listing(names: list[str], shown: int = 3) -> str:
    """The first few names, the rest counted: `a, b, c and 12 more`."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
