"""The goals of the speed table: seconds on an H100 or H200, and ratios of rows. It does not import torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.gpu.parts import FLUX, Row

# Cards whose figures the goals are for; on another they only say how far it is.
CARDS = ("H100", "H200")


class Goal(NamedTuple):
    """A bound for the seconds of a row, or for a ratio of two rows' seconds.

    Attributes:
        row: its seconds, or the ratio's numerator.
        bound: at most this, or at least this if `least`.
        to: the ratio's denominator; None for seconds.
    """

    row: Row
    bound: float
    to: Row | None = None
    least: bool = False


def _flux(how: str, side: int = 1024, policy: str = "full", precision: str = "bf16") -> Row:
    return Row(FLUX, precision, side, policy, how=how)


GOALS = (
    Goal(_flux("compiled"), 1.1),
    Goal(_flux("compiled", policy="none"), 0.84),
    Goal(_flux("compiled", 512, "none"), 0.35),
    Goal(Row("qwen_image", "bf16", 1024, "full", how="compiled"), 0.92),
    Goal(_flux("peer"), 1.7, _flux("compiled"), least=True),
    Goal(_flux("peer"), 2.3, _flux("compiled", policy="none"), least=True),
    Goal(_flux("compiled"), 1.1, _flux("compiled", precision="fp8"), least=True),
    *(
        Goal(_flux("eager", side, precision=precision), 1.15, _flux("eager", side))
        for precision in ("fp8", "nf4")
        for side in (512, 1024)
    ),
)


def lines(head: Mapping[str, Any], records: Mapping[str, Any]) -> list[str]:
    """Return a line for each goal whose rows were measured with real models."""
    if head["tiny"]:
        return []
    ours = any(card in (head["device"] or "") for card in CARDS)

    def seconds(row: Row | None) -> float | None:
        return None if row is None else records.get(row.name, {}).get("facts", {}).get("seconds_per_step")

    found = []
    for goal in GOALS:
        taken, other = seconds(goal.row), seconds(goal.to)
        if taken is None or (goal.to is not None and other is None):
            continue
        value = taken if other is None else taken / other
        is_met = value >= goal.bound if goal.least else value <= goal.bound
        verdict = ("met" if is_met else "not met") if ours else "another card"
        names = " to ".join(row.name.removeprefix("speed ") for row in (goal.row, goal.to) if row is not None)
        bound = f"at {'least' if goal.least else 'most'} {goal.bound:g}{' s' if other is None else ' times'}"
        found.append(f"{verdict}: {value:.3g}, {bound}: {names}")
    return found
