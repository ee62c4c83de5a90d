"""What single settings may be."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Number:
    """A number from `least` to `most`.

    Attributes:
        whole: of no fraction.
        above: whether `least` itself is too small.
        multiple: of what a whole number must be one.
        null: whether it may be left out by null.
        words: that may stand in its place.
        several: whether a list of them may.
        by_pattern: whether a mapping of patterns to them may.
    """

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    above: bool = False
    multiple: int = 1
    null: bool = False
    words: tuple[str, ...] = ()
    several: bool = False
    by_pattern: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a setting may be this."""
        if (self.several and isinstance(value, list)) or (self.by_pattern and isinstance(value, dict)):
            return bool(value) and all(map(self._is_one, value.values() if isinstance(value, dict) else value))
        return (self.null and value is None) or value in self.words or self._is_one(value)

    def _is_one(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        in_range = self.least < value <= self.most if self.above else self.least <= value <= self.most
        return math.isfinite(value) and in_range and (self.multiple == 1 or value % self.multiple == 0)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.multiple > 1:
            kind += f", a multiple of {self.multiple},"
        start, end = f"{self.least:g}", f"{self.most:.10g}"
        if self.least > -math.inf:
            kind += f" above {start}" if self.above else f" from {start}"
            kind += f" to {end}" if self.most < math.inf else "" if self.above else " on"
        others = [*self.words, *(["null"] if self.null else []), *(["a list of them"] if self.several else [])]
        others += ["a mapping {PATTERN:NUMBER}"] if self.by_pattern else []
        return " or ".join([kind, *others])


@dataclass(frozen=True)
class Switch:
    """True or false."""

    def allows(self, value: Any) -> bool:
        """Whether a setting may be this."""
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


class ByPattern(Number):
    """Such a number for each pattern of layers' names, or null."""

    def allows(self, value: Any) -> bool:
        return value is None or (isinstance(value, dict) and all(map(self._is_one, value.values())))

    def __str__(self) -> str:
        return f"a mapping {{PATTERN:NUMBER}} of {super().__str__()}, or null"


Rule = Number | Switch
