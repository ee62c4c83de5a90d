"""What a data set's samples are, in lines for the summary: how they are framed, and what may be a mistake."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from datamodules.errors import count_of, listing
from datamodules.images.decoding import floor_size
from datamodules.images.framing import Framing, Size, View
from datamodules.images.sample_set import Usable
from datamodules.images.samples import SIDE_MULTIPLE, TRIGGER, Root, is_json

# Larger pictures are allowed, with a note: pixels, and the ratio of the longer side to the shorter.
LARGE, LONG = 2**22, 8
SIDED = re.compile(r"\b(left|right)\b", re.IGNORECASE)


def framing_notes(usable: Sequence[Usable], views: Sequence[View], roots: Sequence[Root], noun: str) -> list[str]:
    """What was done to the pictures' sizes.

    Args:
        usable: the samples.
        views: of each the first.
        roots: of each its own.
        noun: what the samples are.
    """
    shrunk: Counter[int] = Counter()
    enlarged: Counter[int] = Counter()
    smaller: Counter[int] = Counter()
    rounded = 0
    for one, view, root in zip(usable, views, roots, strict=True):
        side, (width, height), frame = max(root.resolution, default=0), one.sizes[0], view.windows[0].frame
        if frame[0] > width or frame[1] > height:
            enlarged[side] += 1
        elif side and width * height > side**2 and frame != floor_size(width, height):
            shrunk[side] += 1
        elif side and width * height < side**2:
            smaller[side] += 1
        pictures = zip(one.sizes, view.windows, strict=True)
        rounded += any(own != window.size == floor_size(*own) and not window.cropped for own, window in pictures)
    more, fewer = (f"{noun} have {how} than" for how in ("more", "fewer"))
    notes = [count_of(n, f"{more} {side}x{side} pixels and are shrunk") for side, n in shrunk.items()]
    notes += [count_of(n, f"{fewer} {side}x{side} pixels and are enlarged") for side, n in enlarged.items()]
    notes += [
        count_of(n, f"{fewer} {side}x{side} pixels, kept as small (data.upscale=true enlarges them)")
        for side, n in smaller.items()
    ]
    if rounded:
        notes.append(count_of(rounded, f"{noun} have sides rounded down to a multiple of {SIDE_MULTIPLE}"))
    if frames := sum(any(image.frames for image in one.facts) for one in usable):
        notes.append(count_of(frames, f"{noun} have pictures of several frames, of which the first is used"))
    alpha = [one.sample.key for one in usable if any(image.alpha for image in one.facts)]
    if alpha:
        masked = any(root.alpha_mask for root in roots)
        more = "" if masked else ". data.alpha_mask=true makes the alpha of a target the mask of its loss"
        what = f"{noun} have an alpha channel, whose transparent parts become white, such as {alpha[0]}{more}"
        notes.append(count_of(len(alpha), what))
    if crops := [view.cropped for view in views if view.cropped]:
        notes.append(
            count_of(len(crops), f"{noun} are cropped to the sizes of training, by ")
            + f"{100 * sum(crops) / len(crops):.1f} % on average, at most {100 * max(crops):.1f} %"
        )
    return notes


def bucket_notes(sizes: Sequence[Size], repeats: Sequence[int], full: Mapping[Size, int], noun: str) -> list[str]:
    """Which buckets are smaller than a batch.

    Args:
        sizes, repeats: of each view.
        full: how many views of a size fill a batch.
    """
    counts: Counter[Size] = Counter()
    for size, times in zip(sizes, repeats, strict=True):
        counts[size] += times
    few = [f"{_name(size)} ({n} of {full[size]})" for size, n in counts.items() if n < full[size]]
    if not few or len(counts) == 1:
        return []
    what = f"sizes have fewer {noun} than a batch, whose batches show some several times: "
    return [count_of(len(few), what) + listing(few)]


def _name(size: Size) -> str:
    return " + ".join(f"{width}x{height}" for width, height in size[0]) + "".join(f", {name}" for name in size[1])


def unusual(captions: Sequence[Sequence[str]], sizes: Sequence[Size], framing: Framing, noun: str) -> list[str]:
    """Notes on what is allowed, but may be a mistake.

    Args:
        captions: of each sample.
        sizes: of each sample.
        noun: what the samples are.
    """
    notes: list[str] = []
    if empty := sum(not prompt for prompts in captions for prompt in prompts):
        notes.append(count_of(empty, "captions are empty"))
    if structured := sum(any(map(is_json, prompts)) for prompts in captions):
        notes.append(count_of(structured, f"{noun} have a caption in JSON, which is used whole"))
    if literal := sum(any(TRIGGER in prompt for prompt in prompts) for prompts in captions):
        what = f"{noun} have {TRIGGER} in the captions: data.trigger_word=WORD puts a word there"
        notes.append(count_of(literal, what))
    if several := sum(len(prompts) > 1 for prompts in captions):
        notes.append(count_of(several, f"{noun} have several captions: each time one of them is drawn"))
    if framing.flip and (sided := sum(any(map(SIDED.search, prompts)) for prompts in captions)):
        what = f"{noun} have left or right in the captions, which is wrong for the mirrored pictures of data.flip=true"
        notes.append(count_of(sided, what))
    if large := sum(any(width * height > LARGE for width, height in images) for images, _ in sizes):
        what = f"{noun} have more than {LARGE / 1e6:.0f} megapixels: task=dry_run estimates what a step with them takes"
        notes.append(count_of(large, f"{what}, shrunk ones take less"))
    if long := sum(any(max(size) > LONG * min(size) for size in images) for images, _ in sizes):
        notes.append(count_of(long, f"{noun} are more than {LONG} times as long as wide"))
    return notes
