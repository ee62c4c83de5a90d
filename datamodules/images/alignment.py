"""How far a picture is shifted or scaled against another, by phase correlation of their edges.

Kuglin and Hines, "The phase correlation image alignment method", 1975. Most edits leave edges where they stood, in
whatever colours; where they do not, the blocks of a picture disagree about the shift, and nothing is said.
"""

from typing import NamedTuple

import numpy as np

# float32, (height, width)
Gray = np.ndarray
# A block's correlation from which its shift is believed: unrelated photographs reach 0.2, repeating patterns 0.28,
# shifted and recoloured ones 0.9.
BELIEVED = 0.3
# Of a picture's blocks, those that must agree.
AGREEING = 0.4
# Pixels by which blocks that agree may differ.
TOLERANCE = 0.75
# The least side of a block, in which a shift can be seen.
LEAST_BLOCK = 32
BLOCKS = 4
# Cycles per pixel, of a Gaussian: finer detail is noise and compression.
BAND = 0.12


class Alignment(NamedTuple):
    """Where the target stands: `x` right and `y` down of the control in pixels, `scale` times as large from the middle.

    `agreement`: the share of the blocks that say so.
    """

    x: float
    y: float
    scale: float
    agreement: float


def align(control: Gray, target: Gray) -> Alignment | None:
    """The target against the control, both of one size; None where their edges do not tell."""
    control, target = edges(control), edges(target)
    height, width = target.shape
    found = [_from_blocks(control, target, 0, 0)]
    x, y, _ = shift(control, target)
    x, y = round(x), round(y)
    if (x or y) and abs(x) < width / 2 and abs(y) < height / 2:
        found.append(_from_blocks(control, target, x, y))
    best = max(found, key=lambda one: one.agreement)
    return best if best.agreement >= AGREEING else None


def edges(gray: Gray) -> Gray:
    """The strength of edges, the same for inverted colours."""
    return np.hypot(*np.gradient(gray)).astype(np.float32)


def shift(one: Gray, other: Gray, weight: Gray | None = None) -> tuple[float, float, float]:
    """Return (x, y) in pixels by which `other` lies right and below of `one`, and the correlation there, at most 1.

    Args:
        weight: (height, width) of the pixels, smooth; None for all alike.
    """
    height, width = one.shape
    window = (np.hanning(height)[:, None] * np.hanning(width)).astype(np.float32)
    window = window if weight is None else window * weight
    spectra = [np.fft.rfft2((image - np.average(image, weights=window)) * window) for image in (one, other)]
    cross = spectra[1] * spectra[0].conj()
    strength = np.abs(cross)
    if not strength.any():
        return 0.0, 0.0, 0.0
    band = np.exp(-(np.fft.fftfreq(height)[:, None] ** 2 + np.fft.rfftfreq(width) ** 2) / (2 * BAND**2))
    surface = np.fft.irfft2(cross / (strength + 1e-6 * strength.max()) * band, s=one.shape)
    surface /= np.fft.irfft2(band, s=one.shape)[0, 0]
    y, x = (int(place) for place in np.unravel_index(surface.argmax(), surface.shape))
    down = y + _vertex(surface[y - 1, x], surface[y, x], surface[(y + 1) % height, x])
    right = x + _vertex(surface[y, x - 1], surface[y, x], surface[y, (x + 1) % width])
    return (right + width / 2) % width - width / 2, (down + height / 2) % height - height / 2, float(surface[y, x])


def _vertex(before: float, at: float, after: float) -> float:
    """Of the parabola through three values, from the middle one."""
    bend = before - 2 * at + after
    return 0.0 if bend >= 0 else 0.5 * (before - after) / bend


def _from_blocks(control: Gray, target: Gray, x: int, y: int) -> Alignment:
    """What most blocks agree on, near a shift of (x, y)."""
    height, width = target.shape
    part, moved = control[_overlap(-y, height), _overlap(-x, width)], target[_overlap(y, height), _overlap(x, width)]
    high, wide = part.shape
    side = min(max(max(height, width) // BLOCKS, LEAST_BLOCK), high, wide)
    if side < LEAST_BLOCK:
        return Alignment(x, y, 1.0, 0.0)
    # The blocks' middles from the picture's, and their shifts.
    middles, shifts = [], []
    count = 0
    for top in _starts(high, side):
        for left in _starts(wide, side):
            place = slice(top, top + side), slice(left, left + side)
            right, down, correlation = shift(part[place], moved[place])
            count += 1
            if correlation >= BELIEVED:
                middles.append((left + max(-x, 0) + (side - width) / 2, top + max(-y, 0) + (side - height) / 2))
                shifts.append((x + right, y + down))
    if not shifts:
        return Alignment(x, y, 1.0, 0.0)
    return _fit(np.array(middles), np.array(shifts), count)


def _overlap(offset: int, length: int) -> slice:
    """What a side has in common with one that is moved by -offset."""
    return slice(max(offset, 0), length + min(offset, 0))


def _starts(length: int, side: int) -> list[int]:
    """Where blocks begin, spread evenly."""
    return [round(start) for start in np.linspace(0, length - side, max(1, round(length / side)))]


def _fit(middles: np.ndarray, shifts: np.ndarray, count: int) -> Alignment:
    """shift = (x, y) + zoom * middle, without the blocks that say something else; `count` blocks were asked."""
    offset, zoom = np.median(shifts, axis=0), 0.0
    tolerance = 4 * TOLERANCE  # a zoom moves the outer blocks
    for _ in range(3):
        agree = np.abs(shifts - offset - zoom * middles).max(axis=1) <= tolerance
        if not agree.any():
            return Alignment(float(offset[0]), float(offset[1]), 1.0, 0.0)
        place, moved = middles[agree], shifts[agree]
        centred = place - place.mean(axis=0)
        spread = float((centred**2).sum())
        zoom = float((centred * (moved - moved.mean(axis=0))).sum()) / spread if spread else 0.0
        offset = moved.mean(axis=0) - zoom * place.mean(axis=0)
        tolerance = TOLERANCE
    agree = np.abs(shifts - offset - zoom * middles).max(axis=1) <= tolerance
    return Alignment(float(offset[0]), float(offset[1]), 1.0 + zoom, float(agree.sum()) / count)
