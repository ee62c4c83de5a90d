"""The shift and scale between two images, by phase correlation of their edges.

Kuglin and Hines, "The phase correlation image alignment method", 1975. Most edits leave edges in place, in whatever
colours. Otherwise the blocks of an image disagree about the shift, and there is no result.
"""

from typing import NamedTuple

import numpy as np

# float32, (height, width)
Gray = np.ndarray
# Correlation of a block from which on its shift is believed: unrelated photographs reach 0.2, repeating patterns 0.28,
# shifted and recoloured ones 0.9.
BELIEVED = 0.3
# Share of an image's blocks that must agree, and the pixels by which agreeing ones may differ.
AGREEING_SHARE, TOLERANCE = 0.4, 0.75
# Shortest side of a block in which a shift can be seen, and blocks per side.
LEAST_BLOCK, BLOCKS_ACROSS = 32, 4
# Width of a Gaussian low-pass in cycles per pixel: finer detail is noise and compression.
BAND = 0.12


class Alignment(NamedTuple):
    """Position of the target: `x` right and `y` down of the control in pixels, `scale` times as large.

    `agreement`: the share of the blocks that agree.
    """

    x: float
    y: float
    scale: float
    agreement: float


def align(control: Gray, target: Gray) -> Alignment | None:
    """Align two images of one size; return None if their edges disagree."""
    control, target = edges(control), edges(target)
    x, y, _ = shift(control, target)
    near = dict.fromkeys([(0, 0), (round(x), round(y))])
    best = max((_align_blocks(control, target, *one) for one in near), key=lambda one: one.agreement)
    return best if best.agreement >= AGREEING_SHARE else None


def edges(gray: Gray) -> Gray:
    """Return the strength of edges, the same for inverted colours."""
    return np.hypot(*np.gradient(gray)).astype(np.float32)


def shift(one: Gray, other: Gray, weight: Gray | None = None) -> tuple[float, float, float]:
    """Return (x, y) in pixels by which `other` lies right and below of `one`, and the correlation there, at most 1.

    Args:
        weight: (height, width), smooth weights of the pixels; None for equal ones.
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
    """Return the vertex of the parabola through three values, from the middle one."""
    bend = before - 2 * at + after
    return 0.0 if bend >= 0 else 0.5 * (before - after) / bend


def _align_blocks(control: Gray, target: Gray, x: int, y: int) -> Alignment:
    """Return the alignment of most blocks, near a shift of (x, y)."""
    height, width = target.shape

    def common(x: int, y: int) -> tuple[slice, slice]:
        return slice(max(y, 0), height + min(y, 0)), slice(max(x, 0), width + min(x, 0))

    part, moved = control[common(-x, -y)], target[common(x, y)]
    side = min(max(max(height, width) // BLOCKS_ACROSS, LEAST_BLOCK), *part.shape)
    if side < LEAST_BLOCK:
        return Alignment(x, y, 1.0, 0.0)
    # Centres of the blocks from the centre of the image, and their shifts.
    centres, shifts = [], []
    tops, lefts = (
        np.linspace(0, length - side, max(1, round(length / side))).round().astype(int) for length in part.shape
    )
    for top in tops:
        for left in lefts:
            place = slice(top, top + side), slice(left, left + side)
            right, down, correlation = shift(part[place], moved[place])
            if correlation >= BELIEVED:
                centres.append((left + max(-x, 0) + (side - width) / 2, top + max(-y, 0) + (side - height) / 2))
                shifts.append((x + right, y + down))
    if not shifts:
        return Alignment(x, y, 1.0, 0.0)
    return _fit(np.array(centres), np.array(shifts), len(tops) * len(lefts))


def _fit(centres: np.ndarray, shifts: np.ndarray, count: int) -> Alignment:
    """Fit shift = (x, y) + zoom * centre to most of `count` blocks."""
    offset, zoom = np.median(shifts, axis=0), 0.0
    for tolerance in (4 * TOLERANCE, TOLERANCE, TOLERANCE, TOLERANCE):  # at first a zoom moves the outer blocks
        agree = np.abs(shifts - offset - zoom * centres).max(axis=1) <= tolerance
        found = Alignment(float(offset[0]), float(offset[1]), 1.0 + zoom, float(agree.sum()) / count)
        if not agree.any():
            break
        place, moved = centres[agree], shifts[agree]
        centred = place - place.mean(axis=0)
        spread = float((centred**2).sum())
        zoom = float((centred * (moved - moved.mean(axis=0))).sum()) / spread if spread else 0.0
        offset = moved.mean(axis=0) - zoom * place.mean(axis=0)
    return found
