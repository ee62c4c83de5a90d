"""Failure of a run, judged by its figures: the row of the table in docs/first-edit.md that fits."""

import math
import statistics
from collections.abc import Mapping, Sequence

# Numbers of first steps, and the factor by which later losses exceed their median if they have risen: noise hardly does
# so in as many STEPS in a row. The loss of predicting nothing is about 2.
FIRST_STEPS, STEPS, USELESS = {3: 10.0, 7: 4.0, 20: 3.0}, 5, 3.0
# Share of an edit below which it is hardly learned, below which it is too weak, and above which it is too strong.
HARDLY, WEAK, STRONG = 0.1, 0.3, 1.3
# Pixels of a shift, and levels of 255 outside of the edit, above those of JPEG compression.
SHIFT, DRIFT = 0.5, 10.0
# Share of the steps that were skipped from which on a run counts as failed.
SKIPPED = 0.1
PAGE = "docs/first-edit.md"


def diverged(losses: Sequence[float]) -> str | None:
    """Return a line about a loss that has risen beyond doubt; None if it has not."""
    known = [loss for loss in losses if math.isfinite(loss)]
    medians = {n: statistics.median(known[:n]) for n in FIRST_STEPS if len(known) >= n}
    for start in range(min(FIRST_STEPS), len(known) - STEPS + 1):
        later = known[start : start + STEPS]
        most, before = min((FIRST_STEPS[n] * median, median) for n, median in medians.items() if n <= start)
        if min(later) > max(most, USELESS):
            now = statistics.median(later)
            return f"the loss rises, from {before:.3g} to {now:.3g}: train with a third of optimizer.lr ({PAGE})"
    return None


def diagnosis(
    losses: Sequence[float], validation: Sequence[Mapping[str, float]], monitor: str, more_is_better: bool
) -> str | None:
    """Return a line about the failure that the figures of a run show, with its remedy; None if they show none.

    Args:
        losses: losses of the steps, NaN for a skipped one.
        validation: rows of validation.csv.
        monitor: the figure by which a row after step 0 is the best.
    """
    if losses and sum(not math.isfinite(loss) for loss in losses) > SKIPPED * len(losses):
        return f"NaN: many steps were skipped, the learning rate is too high for the base: a third of it ({PAGE})"
    if (line := diverged(losses)) is not None:
        return line
    judged = [row for row in validation if row["step"] and math.isfinite(row.get(monitor, math.nan))]
    if not judged:
        return None
    best = max(judged, key=lambda row: row[monitor] if more_is_better else -row[monitor])
    before, last = validation[0], validation[-1]
    if "strength" in before and "strength" not in last:
        return f"noise: the images show nothing of their controls any more: a third of optimizer.lr ({PAGE})"
    strength, nothing = best.get("strength", math.nan), best.get(f"{monitor}_nothing", math.nan)
    if strength < WEAK:
        more = f"resume with trainer.max_steps={2 * last['step']:.0f}, or triple optimizer.lr"
        more = f"is optimizer.lr the model's default? If it is, {more}" if strength < HARDLY else more
        return f"the edit is too weak, strength {strength:.2g} of 1: {more} ({PAGE})"
    if strength > STRONG:
        return f"the edit is too strong, strength {strength:.2g} instead of 1: a third of optimizer.lr ({PAGE})"
    if best.get("shift", 0) > max(SHIFT, 2 * before.get("shift", 0)):
        return f"the result is shifted, by {best['shift']:.2g} pixels: the pairs are, run task=inspect ({PAGE})"
    if (best[monitor] - nothing) * (1 if more_is_better else -1) < 0:
        worse = f"{monitor} {best[monitor]:.4g} is worse than doing nothing, {nothing:.4g}"
        return f"{worse}: run task=inspect, then train with a third of optimizer.lr ({PAGE})"
    for name in ("drift", "colour_shift"):
        if best.get(name, 0) > max(DRIFT, 2 * before.get(name, 0)):
            where = f"{name} {best[name]:.2g} levels where nothing should change"
            return f"the background changes, {where}: run task=inspect, or objective.preserve.outside=0.5 ({PAGE})"
    return None
