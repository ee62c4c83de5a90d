"""The part of an image that training uses, and its size: resolutions, buckets, crops and flips."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from datamodules.images.decoding import Facts, Sides, floor_size, shrunk
from datamodules.images.recipe_images import RecipeImage, recipe_image_of
from datamodules.images.samples import SIDE_MULTIPLE, TRIGGER, Root, Sample
from datamodules.images.windows import SAME_PROPORTIONS, ConditionImages, Window, extends, same_proportions
from foundation.errors import UserError, count_of, listing

# Proportions of buckets are powers of this up to 3.2:1, among them 1:1, 4:3 and 16:9. The nearest one is at most 3.7 %
# off, not counting the rounding of the sides.
PROPORTION_STEP = (4 / 3) ** 0.25
PROPORTIONS = 16
# An image that its bucket would crop more, as a panorama, keeps its own proportions.
MOST_CROPPED = 0.06
# Factor between the scales of a control and its target from which on there is a note; rounding to tokens makes less.
MOST_ZOOMED = 1.15
# Images below the resolution go to buckets of a smaller one. Eight coarse steps halve a side; the first is divided into
# fine steps, so that images of about the resolution lose little.
COARSE, FINE = 2 ** (-1 / 8), 2 ** (-1 / 32)
# Position of each further crop in the free space: evenly spread, however many there are (golden ratio).
SPREAD = (5**0.5 - 1) / 2
SIDED = re.compile(r"\b(left|right)\b", re.IGNORECASE)

# Sizes of the target, then of each control; and which of `mask` and `rejected` a sample has, in the target's size.
Size = tuple[tuple[Sides, ...], tuple[str, ...]]
OWN_SIZE = ConditionImages()


def has_edits(sizes: Iterable[Size]) -> bool:
    """Return whether samples of any of these sizes have a condition image."""
    return any(len(images) > 1 for images, _ in sizes)


@dataclass(frozen=True)
class View:
    """A sample as a training step sees it.

    Attributes:
        windows: windows of the target, then of each control; mask and rejected image have the target's.
        weight: weight in the loss.
        repeats: times that an epoch draws it.
        variant: number of the condition image that a recipe makes for these windows.
    """

    sample: Sample
    windows: tuple[Window, ...]
    weight: float = 1.0
    repeats: int = 1
    variant: int = 0

    @property
    def place(self) -> tuple[Any, ...]:
        """The windows, and the variant of an image by a recipe: the difference from the sample's other views."""
        return self.windows if recipe_image_of(self.sample) is None else (*self.windows, self.variant)

    def sample_in(self, epoch: int) -> Sample:
        """Return the sample with the images that recipes make for this view, others in each epoch."""
        sample = self.sample
        if (one := recipe_image_of(sample)) is None:
            return sample
        variant = self.variant + epoch * one.chain.variants

        def made(image: Any) -> Any:
            is_made = isinstance(image, RecipeImage)
            return replace(image, view=self.windows[0], variant=variant) if is_made else image

        controls = tuple(map(made, sample.controls))
        return replace(sample, target=made(sample.target), controls=controls, mask=made(sample.mask))

    @property
    def size(self) -> Size:
        """The key by which samples form batches."""
        optional = {"mask": self.sample.mask, "rejected": self.sample.rejected}
        return tuple(window.size for window in self.windows), tuple(name for name in optional if optional[name])

    @property
    def cropped(self) -> float:
        """Share of the target that is cropped away."""
        return self.windows[0].cropped


@dataclass(frozen=True)
class Framing:
    """The rule by which samples become views.

    Attributes:
        buckets: `exact`: each image keeps its proportions, its sides rounded down to 16; `aspect`: it is cropped to the
            nearest bucket.
        upscale: enlarge smaller images to the resolution.
        crop: `center`, or `random_cached`: `crop_count` windows, the first in the center.
        flip: add a mirrored view of each sample.
        multiple: both sides of a bucket are multiples of it.
        condition_images: the sizes at which the model's encoders see them.
    """

    buckets: str
    upscale: bool
    crop: str
    crop_count: int
    flip: bool
    multiple: int = 16
    condition_images: ConditionImages = OWN_SIZE

    def __post_init__(self) -> None:
        if self.buckets not in ("exact", "aspect"):
            raise UserError(f"data.buckets={self.buckets}: choose auto, exact or aspect")
        if self.crop not in ("center", "random_cached"):
            raise UserError(f"data.crop={self.crop}: choose center or random_cached")
        if self.crop == "random_cached" and self.buckets == "exact":
            raise UserError("data.crop=random_cached needs data.buckets=aspect: exact crops nothing")

    def views(self, sample: Sample, root: Root, sizes: Sequence[Sides], held_out: bool = False) -> list[View]:
        """Return all views of a sample. The first one, of the largest resolution, is used in validation and previews.

        Args:
            root: its root.
            sizes: (width, height) of its target and its controls, upright.
            held_out: return the first view only.
        """
        crops = 1 if self.crop == "center" else self.crop_count
        framing = replace(self, condition_images=self.condition_images.of_count(len(sizes) - 1))
        # Equal windows, of images that need no crop, are one view drawn more often: all samples are drawn equally.
        places = Counter(
            (framing._without_border(sample, framing._windows(sizes, side, crop, flipped), side, variant), variant)
            for side in sorted(root.resolution, reverse=True) or [0]
            for crop in range(crops)
            for flipped in ([False, True] if self.flip else [False])
            for variant in range(root.control.variants if root.control else 1)
        )
        views = [
            View(sample, one, root.weight, root.repeats * count, number) for (one, number), count in places.items()
        ]
        return [View(sample, views[0].windows)] if held_out else views

    def _without_border(
        self, sample: Sample, windows: tuple[Window, ...], side: int, variant: int
    ) -> tuple[Window, ...]:
        """Return the windows; those of images whose border a recipe removes are smaller, at the scale of the target.

        Raises:
            UserError: the target is too small.
        """
        if recipe_image_of(sample) is None:
            return windows
        found, rules = [], self.condition_images
        for window, image in zip(windows, (sample.target, *sample.controls), strict=True):
            if isinstance(image, RecipeImage) and image.chain.has("border"):
                bounds = zip(window.box[:2], window.box[2:], window.frame, strict=True)
                (left, right), (top, bottom) = ((max(0, start), min(end, whole)) for start, end, whole in bounds)
                whole = floor_size(right - left, bottom - top)
                kept = replace(image, view=windows[0], variant=variant).kept(whole)
                if kept == whole:
                    raise UserError(
                        f"data.control=border: {sample.key} is too small, {whole[0]}x{whole[1]} in training"
                    )
                left, top = (left + right - kept[0]) // 2, (top + bottom - kept[1]) // 2
                seen = (
                    rules.fitted(kept, windows[0].size) if rules.fits_target else rules.window(*kept, side**2 or None)
                )
                window = window._replace(box=(left, top, left + kept[0], top + kept[1]), size=seen.size)
            found.append(window)
        return tuple(found)

    def _windows(self, sizes: Sequence[Sides], side: int, crop: int, flipped: bool) -> tuple[Window, ...]:
        """Return the windows of the target and the controls; a `side` of 0 is their own size."""
        own, *controls = sizes
        like = own
        if self.buckets == "exact" and self.condition_images.sets_target:
            like = next((control for control in controls if same_proportions(control, own)), own)
        target = self._window(like, side, crop, flipped)
        return (target, *(self._control(control, own, target, side, flipped) for control in controls))

    def _window(self, own: Sides, side: int, crop: int, flipped: bool) -> Window:
        bucket = find_bucket(self, own, side) if side and self.buckets != "exact" else None
        if bucket is None and self.condition_images.sets_target:
            return self.condition_images.window(*own, side**2 or None, flipped)
        if bucket is None:
            return self._whole(self._scaled(own, side), flipped)
        frame = _covering(own, bucket)
        offset = (0.5 + SPREAD * crop) % 1
        left, top = (round((space - taken) * offset) for space, taken in zip(frame, bucket, strict=True))
        box = left, top, left + bucket[0], top + bucket[1]
        size = self.condition_images.size(*bucket, side**2 or None) if self.condition_images.sets_target else bucket
        return Window(frame, box, size, flipped)

    def _whole(self, frame: Sides, flipped: bool) -> Window:
        """Return the window of a whole image that is resized to `frame`."""
        if self.condition_images.whole_area is not None:
            return self.condition_images.window(*frame, None, flipped)
        size = floor_size(*frame)
        # The target is cropped like a control, or the edit would be learned with a slight zoom.
        return Window.center(frame if self.condition_images.crops else size, size, flipped)

    def _control(self, own: Sides, target_own: Sides, target: Window, side: int, flipped: bool) -> Window:
        images = self.condition_images
        if images.fits_target:
            return target if same_proportions(own, target_own) else images.fitted(own, target.size, flipped)
        if images.sets_target:
            return target if same_proportions(own, target_own) else images.window(*own, side**2 or None, flipped)
        if extends(target_own, own):
            scales = (seen / whole for seen, whole in zip(target.frame, target_own, strict=True))
            width, height = (max(SIDE_MULTIPLE, round(one * scale)) for one, scale in zip(own, scales, strict=True))
            return images.narrowed(self._whole((width, height), flipped))
        if side and self.buckets != "exact":
            shares = same_proportions(own, target_own)
        else:  # a smaller control keeps its size, as in prediction; sides a few pixels apart could round to 16 apart
            frames = self._scaled(own, side), self._scaled(target_own, side)
            shares = all(abs(math.log(one / other)) <= SAME_PROPORTIONS for one, other in zip(*frames, strict=True))
        return images.narrowed(target if shares else self._window(own, side, 0, flipped))

    def _scaled(self, own: Sides, side: int) -> Sides:
        """Return sides shrunk to the area of `side` as in prediction, or enlarged if configured."""
        if not side:
            return own
        if self.upscale and own[0] * own[1] < side**2:
            scale = side / math.sqrt(own[0] * own[1])
            own = round(own[0] * scale), round(own[1] * scale)
        is_whole = self.condition_images.whole_area is not None
        return shrunk(*own, side**2) if is_whole else self.condition_images.shrunk(*own, side**2)


@lru_cache(maxsize=4096)
def find_bucket(framing: Framing, own: Sides, side: int) -> Sides | None:
    """Return the bucket of an image of this (width, height); None if each would crop too much."""
    fine = [FINE**step for step in range(round(math.log(COARSE) / math.log(FINE)))]
    factors = itertools.chain(fine, (COARSE**step for step in itertools.count(1)))
    for factor in itertools.takewhile(lambda one: side * one >= framing.multiple, factors):
        buckets = bucket_table((side * factor) ** 2, framing.multiple, framing.condition_images)
        bucket = min(buckets, key=lambda one: _cropped(own, one))
        if framing.upscale or (bucket[0] <= own[0] and bucket[1] <= own[1]):
            cropped = 1 - math.prod(bucket) / math.prod(_covering(own, bucket))
            return bucket if cropped <= MOST_CROPPED else None
    return None


@lru_cache(maxsize=256)
def bucket_table(area: float, multiple: int, controls: ConditionImages = OWN_SIZE) -> tuple[Sides, ...]:
    """Return sides of about `area` pixels in steps of `multiple`, one pair for each proportion, from tall to wide.

    Args:
        controls: sides that a control can have as well are preferred, if it is resized or has a largest area.
    """
    proportions = (PROPORTION_STEP**step for step in range(-PROPORTIONS, PROPORTIONS + 1))
    return tuple(dict.fromkeys(_nearest(one, area, multiple, controls) for one in proportions))


def _nearest(proportion: float, area: float, multiple: int, controls: ConditionImages) -> Sides:
    """Return the sides nearest to a proportion and an area; the proportion counts four times as much."""
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


def _covering(own: Sides, bucket: Sides) -> Sides:
    """Return the sides of an image that just covers a bucket, in whole pixels."""
    scale = max(bucket[0] / own[0], bucket[1] / own[1])
    return max(bucket[0], round(own[0] * scale)), max(bucket[1], round(own[1] * scale))


def _cropped(own: Sides, bucket: Sides) -> float:
    """Return the share of an image that is cropped away when it covers a bucket."""
    proportion = own[0] / own[1] * bucket[1] / bucket[0]
    return 1 - min(proportion, 1 / proportion)


# Notes for the summary.


def notes_on(
    views: Sequence[View], facts: Sequence[Sequence[Facts]], roots: Sequence[Root], framing: Framing, noun: str
) -> list[str]:
    """Return notes on how images are resized, and on possible mistakes.

    Args:
        views: the first view of each sample.
        facts: facts of the target and the controls of each.
    """
    counts: Counter[str] = Counter()
    zooms = []
    mixed = any(len(own) > 1 for own in facts)
    for view, own, root in zip(views, facts, roots, strict=True):
        side, (width, height), prompts = max(root.resolution, default=0), own[0].size, view.sample.prompts
        small = width * height < side**2 and view.windows[0].frame[0] <= width
        counts[f"{noun} have fewer than {side}x{side} pixels, kept as small (data.upscale=true enlarges them)"] += small
        counts[f"{noun} have images of several frames, of which the first is used"] += any(one.frames for one in own)
        if len(own) == 2 and (recipe_image_of(view.sample) or not same_proportions(own[1].size, own[0].size)):
            scale, other = (
                math.sqrt(math.prod(w.frame) / math.prod(w.seen) * math.prod(w.size) / math.prod(o.size))
                for w, o in zip(view.windows, own, strict=True)
            )
            zooms += [max(scale / other, other / scale)]
        counts["captions are empty"] += sum(not prompt for prompt in prompts)
        counts[f"{noun} have no condition image: they are text to image"] += mixed and len(own) == 1
        literal = any(TRIGGER in prompt for prompt in prompts)
        counts[f"{noun} have {TRIGGER} in the captions: data.trigger_word=WORD puts a word there"] += literal
        sided = framing.flip and any(map(SIDED.search, prompts))
        counts[f"{noun} have left or right in the captions, wrong for the mirrored images of data.flip=true"] += sided
        effect = "whose transparent parts become white"
        if framing.condition_images.alpha:
            effect = "which this model learns"
        elif not root.alpha_mask:
            effect += ". data.alpha_mask=true makes the alpha of a target the mask of its loss"
        counts[f"{noun} have an alpha channel, {effect}"] += any(one.alpha for one in own)
    notes = [count_of(count, text) for text, count in counts.items() if count]
    if zooms := [zoom for zoom in zooms if zoom > MOST_ZOOMED]:
        what = "have control and target of different sizes, resized to different scales"
        extent = f"by up to {max(zooms):.2f} times. Extending an image is learned with that zoom"
        notes.append(count_of(len(zooms), f"{noun} {what}, {extent}"))
    if crops := [view.cropped for view in views if view.cropped]:
        share = f"{100 * sum(crops) / len(crops):.1f} % on average, at most {100 * max(crops):.1f} %"
        notes.append(count_of(len(crops), f"{noun} are cropped to the sizes of training, by {share}"))
    return notes


def bucket_notes(sizes: Sequence[Size], repeats: Sequence[int], full: Mapping[Size, int], noun: str) -> list[str]:
    """Return a note on the sizes with fewer views than a batch.

    Args:
        sizes, repeats: size and repeats of each view.
        full: number of views of a size that fill a batch.
    """
    counts: Counter[Size] = Counter()
    for size, times in zip(sizes, repeats, strict=True):
        counts[size] += times
    few = [
        " + ".join(f"{width}x{height}" for width, height in size[0])
        + "".join(f", {name}" for name in size[1])
        + f" ({count} of {full[size]})"
        for size, count in counts.items()
        if count < full[size]
    ]
    if not few or len(counts) == 1:
        return []
    what = f"sizes have fewer {noun} than a batch, whose batches show some several times: "
    return [count_of(len(few), what) + listing(few)]
