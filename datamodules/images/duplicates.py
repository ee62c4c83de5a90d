"""Samples whose pictures others have too, by perceptual hashes."""

from collections.abc import Iterator, Sequence

import numpy as np

from datamodules.images.inspection import Finding, Kind, Print
from datamodules.images.samples import Sample

# Bits of 64: recompressed, resized and slightly cropped copies differ by up to 4, other photographs by 20 and more.
# What has the same outlines in other colours is told apart by its colours.
NEAR_BITS, NEAR_COLOURS = 4, 4
# For targets of one control, which several edits share: one small edit more or less changes this much of a cell.
SAME_BITS, SAME_COLOURS = 2, 2
# Pairs of hashes that are compared at once.
AT_ONCE = 2**22
# Of one picture, how many like it are looked at.
MOST = 64


class Prints:
    """Prints of many pictures, by number; the missing ones are like none."""

    def __init__(self, prints: Sequence[Print | None]) -> None:
        self.known = np.array([number for number, one in enumerate(prints) if one is not None], dtype=np.int64)
        present = [one for one in prints if one is not None]
        self.hashes = np.array([one.hash for one in present], dtype=np.uint64)
        self.colours = np.array([one.colours for one in present], dtype=np.int16)

    def near(self, others: "Prints") -> Iterator[tuple[int, int, bool]]:
        """(number, number among `others`, whether they are the same rather than near); each pair once among its own."""
        if not len(self.known) or not len(others.known):
            return
        rows = max(1, AT_ONCE // len(others.known))
        for start in range(0, len(self.known), rows):
            bits = np.bitwise_count(self.hashes[start : start + rows, None] ^ others.hashes)
            for row in np.flatnonzero((bits <= NEAR_BITS).any(axis=1)):
                one = start + int(row)
                columns = np.flatnonzero(bits[row] <= NEAR_BITS)
                columns = (columns[columns < one] if others is self else columns)[:MOST]
                apart = np.abs(others.colours[columns] - self.colours[one]).max(axis=(1, 2, 3), initial=0)
                for column, most in zip(columns, apart, strict=True):
                    if most <= NEAR_COLOURS:
                        same = most <= SAME_COLOURS and bits[row, column] <= SAME_BITS
                        yield int(self.known[one]), int(others.known[column]), bool(same)


def repeated(
    samples: Sequence[Sample], targets: Sequence[Print | None], controls: Sequence[Print | None], held: set[int]
) -> list[Finding]:
    """Targets that occur twice, and pictures of held-out samples that are trained on; each sample once.

    One control with several instructions and targets is how sets of edits are made, and so is one pair with several
    instructions: they are no faults, as long as the same files are named.

    Args:
        targets, controls: the prints of each sample's.
        held: the numbers of the samples that are held out.
    """
    all_targets = Prints(targets)
    found: dict[int, Finding] = {}
    for number, other, same in all_targets.near(all_targets):
        one, two = samples[number], samples[other]
        if _is_meant(one, two) or (not same and _share_control(one, two, controls[number], controls[other])):
            continue
        if (number in held) == (other in held):
            found.setdefault(number, Finding(Kind.DUPLICATE, one.key, f"as {two.key}", one, two))
        else:
            inside, outside = (number, other) if number in held else (other, number)
            _leak(found, samples, inside, outside, "target")
    learned = [None if number in held else one for number, one in enumerate(controls)]
    tested = [one if number in held else None for number, one in enumerate(controls)]
    for number, other, _ in Prints(tested).near(Prints(learned)):
        if samples[number].controls[0] != samples[other].controls[0]:
            _leak(found, samples, number, other, "control")
    return list(found.values())


def _leak(found: dict[int, Finding], samples: Sequence[Sample], inside: int, outside: int, what: str) -> None:
    if inside not in found or found[inside].kind is not Kind.LEAK:
        one, two = samples[inside], samples[outside]
        found[inside] = Finding(Kind.LEAK, one.key, f"{what} as {two.key}", one, two)


def _is_meant(one: Sample, other: Sample) -> bool:
    """Whether two samples name the same files for different instructions."""
    same = one.target == other.target and one.controls == other.controls
    return same and not set(one.prompts) & set(other.prompts)


def _share_control(one: Sample, other: Sample, print_one: Print | None, print_other: Print | None) -> bool:
    if one.controls[:1] == other.controls[:1] and one.controls:
        return True
    return bool(list(Prints([print_one]).near(Prints([print_other]))))
