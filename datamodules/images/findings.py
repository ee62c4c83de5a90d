"""What may be wrong with a data set, the worst first, and what to do about it."""

from enum import Enum
from typing import NamedTuple

from datamodules.images.sample import Sample


class Kind(Enum):
    """A fault: its name, and what to do about it; the order is the report's."""

    LEAK = "leak", "learned and held out: remove it from one of the two"
    UNREADABLE = "unreadable", "repair or remove the file"
    INCOMPLETE = "incomplete", "add what is missing, or remove the rest"
    EQUAL = "equal", "nothing to learn: remove it, or find the right file"
    PROPORTION = "proportion", "crop both alike, unless the edit extends the picture"
    SHIFTED = "shifted", "align or crop both alike: the shift is learned with the edit"
    SCALED = "scaled", "align or crop both alike: the zoom is learned with the edit"
    NEARLY_EQUAL = "nearly equal", "no more than compression differs: remove it, or find the right file"
    BLANK = "blank", "one colour: find the right file"
    MASK = "mask", "draw it anew for this target, or leave it out"
    DUPLICATE = "duplicate", "the same target twice: remove one"
    SMALL = "low resolution", "find a larger original, or train at a lower data.resolution"
    COMPRESSED = "compressed", "find a better original: blocks and halos are learned"
    NO_CAPTION = "empty caption", "write one"
    NO_LETTERS = "caption without letters", "write it in words; data.caption_per_line=false keeps a file whole"
    REPEATED_CAPTION = "repeated caption", "write its own: the others have theirs"
    LONG_CAPTION = "long caption", "shorten it: the end is cut off"

    def __init__(self, label: str, remedy: str) -> None:
        self.label = label
        self.remedy = remedy


class Finding(NamedTuple):
    """A fault of a sample.

    Attributes:
        key: the sample's, or what is left of one that is incomplete.
        figure: how much, in a few words.
        sample: None for an incomplete one.
        other: the sample that it repeats.
    """

    kind: Kind
    key: str
    figure: str
    sample: Sample | None = None
    other: Sample | None = None


def mostly_small(found: list[Finding], count: int) -> list[Finding]:
    """One finding in the place of those of low resolution, where most of `count` samples have one: it is the set's."""
    small = [finding for finding in found if finding.kind is Kind.SMALL]
    if 2 * len(small) <= count:
        return found
    summary = Finding(Kind.SMALL, f"{len(small)} of {count}", f"such as {small[0].key}: {small[0].figure}")
    return [summary, *(finding for finding in found if finding.kind is not Kind.SMALL)]


def worst_first(findings: list[Finding]) -> list[Finding]:
    """In the order of `Kind`; findings of one kind keep theirs."""
    order = {kind: number for number, kind in enumerate(Kind)}
    return sorted(findings, key=lambda finding: order[finding.kind])
