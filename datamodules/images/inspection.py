"""What may be wrong with a data set, the worst first, and what to do about it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import imagehash
import numpy as np
from PIL import Image

from datamodules.errors import UserError, listing, printable
from datamodules.images.alignment import align, edges
from datamodules.images.decoding import MOST_PIXELS, ONE_LARGE, image_size, open_image, picture
from datamodules.images.samples import SIDE_MULTIPLE, Picture, Sample
from datamodules.images.windows import resize


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


# The longer side of the small copies; a JPEG is decoded at a fraction of its size.
SIDE, DECODED_AREA = 512, 256**2
# Of the ratio of the sides.
PROPORTION = 0.02
# Pixels of the small copies: two at a megapixel. Blocks agree to a tenth of one.
SHIFT = 1.0
# Sums of the tables of quality 50 (ITU T.81, annex K.1), from which libjpeg scales the others.
LUMA_AT_50 = 3688
LEAST_QUALITY = 50
# Levels of 255 between the darkest and the brightest pixel of each colour.
ONE_COLOUR = 8
# Cells a side of what is kept of colours.
CELLS = 8


@dataclass(frozen=True)
class Print:
    """What is kept of a picture, to find it again: a perceptual hash of 64 bits, and colours (CELLS, CELLS, 3)."""

    hash: int
    colours: np.ndarray


@dataclass(frozen=True)
class Look:
    """A picture's (width, height), a copy of at most `SIDE` pixels, and the quality that it was saved with as JPEG."""

    size: tuple[int, int]
    small: Image.Image
    quality: int | None


class Inspected(NamedTuple):
    """What was found in a sample, and the prints of its target and its control; None for one colour and unreadable."""

    findings: list[Finding]
    target: Print | None
    control: Print | None


def look(path: Picture) -> Look:
    """Read a picture once.

    Raises:
        UserError: it cannot be read.
    """
    size = image_size(path)
    with picture(path) as image:
        quality = jpeg_quality(image)
    with ONE_LARGE if size[0] * size[1] > MOST_PIXELS else nullcontext():
        image = open_image(path, DECODED_AREA)
    scale = min(1.0, SIDE / max(size))
    width, height = (max(SIDE_MULTIPLE, round(side * scale)) for side in size)
    return Look(size, resize(image, (width, height)), quality)


def look_at_mask(path: Picture) -> Look:
    """The same of a mask, whose sides may be as short as they like."""
    with picture(path) as image:
        large = image.width * image.height > MOST_PIXELS
    with ONE_LARGE if large else nullcontext():
        mask = open_image(path, in_srgb=False)
    small = mask.copy()
    small.thumbnail((SIDE, SIDE))
    return Look(mask.size, small, None)


def jpeg_quality(image: Image.Image) -> int | None:
    """About what libjpeg would call it, from the quantization table; None for other formats."""
    tables = getattr(image, "quantization", None)
    if image.format not in ("JPEG", "MPO") or not tables:
        return None
    scale = 100 * sum(tables[min(tables)]) / LUMA_AT_50
    return round(max(1.0, min(100.0, 5000 / scale if scale > 100 else (200 - scale) / 2)))


def is_one_colour(image: Image.Image) -> bool:
    """Whether nothing is to be seen."""
    pixels = np.asarray(image)
    return bool(np.ptp(pixels, axis=(0, 1)).max() <= ONE_COLOUR)


def print_of(image: Image.Image) -> Print:
    """What a picture can be found again by."""
    bits = np.packbits(imagehash.phash(image).hash.flatten())
    return Print(int.from_bytes(bits.tobytes()), np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX)))


def same_proportion(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether the ratios of the sides are alike."""
    return abs(one[0] * other[1] / (one[1] * other[0]) - 1) <= PROPORTION


def nearly_equal(control: Image.Image, target: Image.Image) -> bool:
    """Whether two pictures of one size differ by no more than compression makes.

    JPEG of quality 75 changes pixels by up to 5 levels of 255 on average, but the means of blocks by less than 9, that
    of the picture by less than 0.3, and it adds hardly any edges. An edit changes one of these, however small it is: a
    dot of a fiftieth of the width the mean of a block, a little more light that of the picture, blurring and noise the
    edges.
    """
    one, other = (np.asarray(image, np.float32) for image in (control, target))
    change = other - one
    height, width = (side // 8 * 8 for side in change.shape[:2])
    blocks = change[:height, :width].reshape(height // 8, 8, width // 8, 8, 3).mean((1, 3))
    if np.abs(change).mean() > 5 or np.abs(change.mean((0, 1))).max() > 0.35 or np.abs(blocks).max(initial=0) > 9:
        return False
    before, after = (float((edges(image.mean(2)) ** 2).sum()) for image in (one, other))
    return 0.85 * before <= after <= 1.05 * before


def inspect_sample(sample: Sample, sides: tuple[int, ...], see: Callable[[Picture], Look] = look) -> Inspected:
    """What is wrong with a sample's pictures.

    Args:
        sides: of the squares of whose area it is trained; empty for its own size.
        see: `look`, or one that remembers.
    """
    seen: dict[Picture, Look] = {}
    findings: list[Finding] = []
    masks = [sample.mask] if sample.mask else []
    rejected = [sample.rejected] if sample.rejected else []
    for path in (sample.target, *sample.controls, *masks, *rejected):
        try:
            seen[path] = look_at_mask(path) if path in masks else see(path)
        except UserError as error:
            findings.append(_finding(sample, Kind.UNREADABLE, printable(str(error).replace(str(path), _name(path)))))
    target, controls = seen.get(sample.target), [seen[path] for path in sample.controls if path in seen]
    if target is not None:
        findings += _of_target(sample, target, sides)
    findings += [
        _finding(sample, Kind.BLANK, f"control {number}" if len(controls) > 1 else "control")
        for number, control in enumerate(controls, 1)
        if is_one_colour(control.small)
    ]
    if target is not None and sample.mask in seen:
        findings += _of_mask(sample, seen[sample.mask], target)
    other = seen.get(sample.rejected) if sample.rejected else None
    if target is not None and other is not None and nearly_equal(resize(other.small, target.small.size), target.small):
        findings.append(_finding(sample, Kind.NEARLY_EQUAL, "rejected and target"))
    if target is not None and len(controls) == len(sample.controls) > 0:
        findings += _of_pair(sample, target, controls, sides)
    first = seen.get(sample.controls[0]) if sample.controls else None
    return Inspected(findings, *(_print(one) for one in (target, first)))


def _print(seen: Look | None) -> Print | None:
    return None if seen is None or is_one_colour(seen.small) else print_of(seen.small)


def _finding(sample: Sample, kind: Kind, figure: str) -> Finding:
    return Finding(kind, sample.key, figure, sample)


def _name(path: Picture) -> str:
    return str(path).rpartition("/")[2]


def _of_target(sample: Sample, target: Look, sides: tuple[int, ...]) -> Iterator[Finding]:
    width, height = target.size
    if is_one_colour(target.small):
        yield _finding(sample, Kind.BLANK, "target")
    # Of several sides the least: a small picture may be there for that one.
    if sides and width * height < min(sides) ** 2 / 2:
        yield _finding(sample, Kind.SMALL, f"{width}x{height}, data.resolution={min(sides)}")
    if target.quality is not None and target.quality < LEAST_QUALITY:
        yield _finding(sample, Kind.COMPRESSED, f"JPEG quality {target.quality}")


def _of_mask(sample: Sample, mask: Look, target: Look) -> Iterator[Finding]:
    if is_one_colour(mask.small):
        level = np.asarray(mask.small).mean() / 255
        yield _finding(sample, Kind.MASK, "all white" if level > 0.95 else "all black" if level < 0.05 else "one grey")
    if not same_proportion(mask.size, target.size):
        yield _finding(sample, Kind.MASK, _sizes("mask", mask, target))


def _sizes(name: str, one: Look, target: Look) -> str:
    return f"{name} {one.size[0]}x{one.size[1]}, target {target.size[0]}x{target.size[1]}"


def _of_pair(sample: Sample, target: Look, controls: list[Look], sides: tuple[int, ...]) -> Iterator[Finding]:
    alike = [number for number, control in enumerate(controls) if same_proportion(control.size, target.size)]
    if not alike:
        yield _finding(sample, Kind.PROPORTION, _sizes("control", controls[0], target))
        return
    if is_one_colour(target.small):
        return
    for number in alike:
        control = resize(controls[number].small, target.small.size)
        if nearly_equal(control, target.small) and _equal_in_training(sample, number, sides):
            which = f"control {number + 1}" if len(controls) > 1 else "control and target"
            same = not np.any(np.asarray(control) != np.asarray(target.small))
            yield _finding(sample, Kind.EQUAL if same else Kind.NEARLY_EQUAL, which)
            return
    yield from _of_alignment(sample, target, controls[alike[0]])


def _equal_in_training(sample: Sample, number: int, sides: tuple[int, ...]) -> bool:
    """Whether they are also nearly equal at the size of training, where fine detail shows: a blurred control, noise."""
    area = max(sides) ** 2 if sides else MOST_PIXELS
    target, control = (open_image(path, area) for path in (sample.target, sample.controls[number]))
    if max(target.size) <= SIDE:
        return True
    return nearly_equal(resize(control, target.size), target)


def _of_alignment(sample: Sample, target: Look, control: Look) -> Iterator[Finding]:
    width, height = target.small.size
    gray = [np.asarray(resize(one.small, (width, height)).convert("L"), np.float32) for one in (control, target)]
    found = align(*gray)
    if found is None:
        return
    right, down = (offset * target.size[0] / width for offset in (found.x, found.y))
    if np.hypot(found.x, found.y) >= SHIFT:
        share = 100 * np.hypot(found.x, found.y) / max(width, height)
        ways = [way for way in (_way(right, "right", "left"), _way(down, "down", "up")) if way]
        figure = f"{', '.join(ways)} ({share:.1f} %)"
        yield _finding(sample, Kind.SHIFTED, figure)
    if abs(found.scale - 1) * max(width, height) / 2 >= 2 * SHIFT:
        yield _finding(sample, Kind.SCALED, f"x {found.scale:.3f}")


def _way(pixels: float, there: str, back: str) -> str:
    return f"{abs(pixels):.0f} px {there if pixels > 0 else back}" if round(pixels) else ""


# Share of the samples that must have captions of their own before a repeated one is a mistake: else it is the edit's.
VARIED = 0.8
# Shorter captions are instructions ("make it snow"), which may be right for several pictures; a description is not.
LEAST_WORDS = 6
# Captions that are counted at once.
CAPTIONS_AT_ONCE = 1000


def caption_findings(samples: Sequence[Sample]) -> list[Finding]:
    """Captions that are empty, unless all are, or lack letters, and descriptions that a few of many pictures share."""
    found = [
        Finding(Kind.NO_CAPTION, sample.key, "no words", sample)
        for sample in samples
        if not all(prompt.strip() for prompt in sample.prompts)
    ]
    if samples and len(found) == len(samples):
        found = [Finding(Kind.NO_CAPTION, f"all {len(samples)}", "no words")]
    found += [
        Finding(Kind.NO_LETTERS, sample.key, listing(bare), sample)
        for sample in samples
        if (bare := [prompt for prompt in sample.prompts if prompt.strip() and not any(map(str.isalpha, prompt))])
    ]
    owners: dict[str, dict[Picture, Sample]] = defaultdict(dict)
    for sample in samples:
        for prompt in sample.prompts:
            owners[prompt.strip()].setdefault(sample.target, sample)
    own = sum(len(owned) == 1 for owned in owners.values())
    targets = len({sample.target for sample in samples})
    for prompt, owned in owners.items():
        if len(owned) > 1 and own >= VARIED * targets and len(prompt.split()) >= LEAST_WORDS:
            first, *others = owned.values()
            found += [Finding(Kind.REPEATED_CAPTION, one.key, f"as {first.key}", one, first) for one in others]
    return found


def long_captions(
    samples: Iterable[Sample], count: Callable[[list[str]], tuple[list[int], int] | None]
) -> list[Finding]:
    """Captions of more tokens than the text encoder reads.

    Args:
        count: the tokens of each of some captions, and how many are read; None for all.
    """
    by_prompt = {prompt: sample for sample in samples for prompt in sample.prompts}
    prompts = list(by_prompt)
    found = []
    for start in range(0, len(prompts), CAPTIONS_AT_ONCE):
        some = prompts[start : start + CAPTIONS_AT_ONCE]
        if (counted := count(some)) is None:
            break
        tokens_of, limit = counted
        for prompt, tokens in zip(some, tokens_of, strict=True):
            if tokens > limit:
                sample = by_prompt[prompt]
                found.append(Finding(Kind.LONG_CAPTION, sample.key, f"{tokens} tokens, {limit} are read", sample))
    return found
