"""Cases of a test, of which a few stand for the others in the suite."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(kept: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases, with those after the first `kept` marked as slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] * (number >= kept))
        for number, case in enumerate(cases)
    ]
