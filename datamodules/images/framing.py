"""Which part of a picture is seen, and at what size: resolutions, buckets, crops and flips."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from datamodules.errors import UserError
from datamodules.images.decoding import floor_size, shrunk
from datamodules.images.samples import Root, Sample
from datamodules.images.windows import SAME_PROPORTIONS, ConditionImages, Window

# Proportions of buckets are powers of it, up to 3.2 : 1: among them 1:1, 4:3 and 16:9. The nearest one is at most 3.7 %
# off, without the rounding of the sides.
STEP = (4 / 3) ** 0.25
STEPS = 16
# A picture that the nearest bucket would crop more, as a panorama, keeps its own proportions.
MOST_CROPPED = 0.06
# Pictures that are smaller than the resolution go to buckets of a smaller one. Eight coarse steps halve a side; the
# first one is taken in fine steps, that pictures of about the resolution lose little.
COARSE, FINE = 2 ** (-1 / 8), 2 ** (-1 / 32)
# Where each further crop lies, as a share of the space around it: spread evenly, however many there are (golden ratio).
SPREAD = (5**0.5 - 1) / 2

Sides = tuple[int, int]
# Sizes of the target, then of each control; and which of `mask` and `rejected` a sample has, in the target's size.
Size = tuple[tuple[Sides, ...], tuple[str, ...]]
OWN_SIZE = ConditionImages()


@dataclass(frozen=True)
class View:
    """A sample as a step sees it.

    Attributes:
        windows: of the target, then of each control; the mask and the rejected picture have the target's.
        weight: in the loss.
        repeats: how often an epoch has it.
    """

    sample: Sample
    windows: tuple[Window, ...]
    weight: float = 1.0
    repeats: int = 1

    @property
    def size(self) -> Size:
        """What the samples of a batch have in common."""
        beside = {"mask": self.sample.mask, "rejected": self.sample.rejected}
        return tuple(window.size for window in self.windows), tuple(name for name in beside if beside[name] is not None)

    @property
    def cropped(self) -> float:
        """The share of the target that is not seen."""
        return self.windows[0].cropped


@dataclass(frozen=True)
class Framing:
    """How samples become views.

    Attributes:
        buckets: `exact`: each picture keeps its proportions, its sides rounded down to 16; `aspect`: it gets those of
            the nearest bucket, to which it is cropped; `family`: the same with the sizes that the model's pipeline
            prefers.
        upscale: whether smaller pictures are enlarged to the resolution.
        crop: `center`, or `random_cached`: `crop_count` windows, of which the first is in the center.
        flip: whether each sample is seen mirrored too.
        multiple: of which both sides of a bucket are multiples.
        preferred: of `family`.
        condition_images: at what size the model's encoders see them.
    """

    buckets: str
    upscale: bool
    crop: str
    crop_count: int
    flip: bool
    multiple: int = 16
    preferred: tuple[Sides, ...] = ()
    condition_images: ConditionImages = OWN_SIZE

    def __post_init__(self) -> None:
        if self.buckets not in ("exact", "aspect", "family"):
            raise UserError(f"data.buckets={self.buckets}: choose auto, exact, aspect or family")
        if self.crop not in ("center", "random_cached"):
            raise UserError(f"data.crop={self.crop}: choose center or random_cached")
        if self.crop == "random_cached" and self.buckets == "exact":
            raise UserError("data.crop=random_cached needs data.buckets=aspect or family: exact crops nothing")

    def views(self, sample: Sample, root: Root, sizes: Sequence[Sides], held_out: bool = False) -> list[View]:
        """All that training sees of a sample; the first is what its examples show.

        Args:
            root: whose sample it is.
            sizes: (width, height) of its target and its controls, upright.
            held_out: whether only the first view is wanted: what is measured is measured once, and nothing is drawn.
        """
        # The first view is the largest: validation and previews have it.
        sides = sorted(root.resolution, reverse=True) or [0]
        crops = 1 if self.crop == "center" else self.crop_count
        # Equal ones, of pictures that need no crop, are one view that comes as often: all samples are seen as often.
        windows = Counter(
            self._windows(sizes, side, crop, flipped)
            for side in sides
            for crop in range(crops)
            for flipped in ([False, True] if self.flip else [False])
        )
        if held_out:
            return [View(sample, next(iter(windows)))]
        return [View(sample, one, root.weight, root.repeats * count) for one, count in windows.items()]

    def _windows(self, sizes: Sequence[Sides], side: int, crop: int, flipped: bool) -> tuple[Window, ...]:
        """Return the windows of the target and the controls; a `side` of 0 is their own size."""
        same_view = (own for own in sizes[1:] if self._is_set_by(own, sizes[0]))
        like = next(same_view, sizes[0]) if self.buckets == "exact" else sizes[0]
        target = self._place(like, side, crop, flipped)
        return (target, *(self._control(own, sizes[0], target, side, flipped) for own in sizes[1:]))

    def _place(self, own: Sides, side: int, crop: int, flipped: bool) -> Window:
        bucket = find_bucket(self, own, side) if side and self.buckets != "exact" else None
        if bucket is None and self.condition_images.sets_target:
            return self.condition_images.window(*own, side**2 or None, flipped)
        if bucket is None:
            frame = self._own_proportions(own, side)
            size = floor_size(*frame)
            # A control is cropped so: its target as well, or the edit would be learned with a little zoom.
            return Window.center(frame, size, flipped) if self.condition_images.crops else Window.whole(size, flipped)
        frame = _covering(own, bucket)
        offset = (0.5 + SPREAD * crop) % 1
        left, top = ((space - taken) * offset for space, taken in zip(frame, bucket, strict=True))
        box = round(left), round(top), round(left) + bucket[0], round(top) + bucket[1]
        size = self.condition_images.size(*bucket, side**2 or None) if self.condition_images.sets_target else bucket
        return Window(frame, box, size, flipped)

    def _control(self, own: Sides, target_own: Sides, target: Window, side: int, flipped: bool) -> Window:
        images = self.condition_images
        if images.sets_target:
            return target if self._is_set_by(own, target_own) else images.window(*own, side**2 or None, flipped)
        if side and self.buckets != "exact":
            shares = _show_the_same(own, target_own)
        else:  # a smaller one keeps its size, as in prediction; sides that differ by a few pixels would differ by 16
            frames = self._own_proportions(own, side), self._own_proportions(target_own, side)
            shares = all(abs(math.log(one / other)) <= SAME_PROPORTIONS for one, other in zip(*frames, strict=True))
        return images.narrowed(target if shares else self._place(own, side, 0, flipped))

    def _is_set_by(self, own: Sides, target_own: Sides) -> bool:
        """Return whether a control of these sides determines the grid of its target."""
        return self.condition_images.sets_target and _show_the_same(own, target_own)

    def _own_proportions(self, own: Sides, side: int) -> Sides:
        """Shrunk to the area of `side`, and enlarged if that is wanted."""
        if not side:
            return own
        if self.upscale and own[0] * own[1] < side**2:
            scale = side / math.sqrt(own[0] * own[1])
            own = round(own[0] * scale), round(own[1] * scale)
        return shrunk(*own, side**2)

    def tables(self, side: int) -> Iterator[Sequence[Sides]]:
        """The buckets of a resolution, and of smaller and smaller ones."""
        fine = [FINE**step for step in range(round(math.log(COARSE) / math.log(FINE)))]
        factors = itertools.chain(fine, (COARSE**step for step in itertools.count(1)))
        for number, factor in enumerate(factors):
            if side * factor < self.multiple:
                return
            if self.buckets == "family" and self.preferred and number == 0:
                yield self.preferred
            else:
                yield bucket_table((side * factor) ** 2, self.multiple, self.condition_images)


@lru_cache(maxsize=4096)
def find_bucket(framing: Framing, own: Sides, side: int) -> Sides | None:
    """The bucket of a picture of this (width, height); None where each would crop too much."""
    for buckets in framing.tables(side):
        bucket = min(buckets, key=lambda one: _cropped(own, one))
        if framing.upscale or (bucket[0] <= own[0] and bucket[1] <= own[1]):
            cropped = 1 - math.prod(bucket) / math.prod(_covering(own, bucket))
            return bucket if cropped <= MOST_CROPPED else None
    return None


@lru_cache(maxsize=256)
def bucket_table(area: float, multiple: int, controls: ConditionImages = OWN_SIZE) -> tuple[Sides, ...]:
    """Sides in steps of `multiple`, of about `area` pixels: one for each proportion, from the highest to the widest.

    Args:
        controls: sides that a control gets too come first, where it is resized or has a largest area.
    """
    found = {_nearest(STEP**step, area, multiple, controls): None for step in range(-STEPS, STEPS + 1)}
    return tuple(found)


def _nearest(proportion: float, area: float, multiple: int, controls: ConditionImages) -> Sides:
    """The sides that come nearest to a proportion and an area; the proportion counts four times as much."""
    width, height = math.sqrt(area * proportion), math.sqrt(area / proportion)
    candidates = [
        (max(1, round_x(width / multiple)) * multiple, max(1, round_y(height / multiple)) * multiple)
        for round_x in (math.floor, math.ceil)
        for round_y in (math.floor, math.ceil)
    ]

    def distance(one: Sides) -> float:
        return abs(math.log(one[0] / one[1] / proportion)) + abs(math.log(one[0] * one[1] / area)) / 4

    shared = [one for one in candidates if controls.size(*one) == one]
    return min(shared or candidates, key=distance)


def _show_the_same(control: Sides, target: Sides) -> bool:
    """Return whether two images have the same proportions, and so the same view."""
    return abs(math.log(control[0] / control[1] * target[1] / target[0])) <= SAME_PROPORTIONS


def _covering(own: Sides, bucket: Sides) -> Sides:
    """The sides of a picture that just covers a bucket, in whole pixels."""
    scale = max(bucket[0] / own[0], bucket[1] / own[1])
    return max(bucket[0], round(own[0] * scale)), max(bucket[1], round(own[1] * scale))


def _cropped(own: Sides, bucket: Sides) -> float:
    """The share of a picture that covering a bucket crops away."""
    proportion = own[0] / own[1] * bucket[1] / bucket[0]
    return 1 - min(proportion, 1 / proportion)
