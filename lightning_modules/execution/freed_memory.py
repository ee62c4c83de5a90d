"""The host's memory while models are loaded."""

import ctypes
from collections.abc import Callable
from functools import cache


def return_freed_memory() -> None:
    """Let the system have what was freed.

    glibc keeps freed pieces below a threshold that rises to 32 MB, in case they are asked for again; while a large
    model is quantized layer by layer they would add up to its unquantized size.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; None where the C library is another, which returns memory by itself."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
