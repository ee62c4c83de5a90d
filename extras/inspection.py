"""Faults of a data set, measured on small copies of its images and on their prints."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from PIL import Image

from datamodules.images.alignment import align, edges
from datamodules.images.captions import is_reply, wrapped_line
from datamodules.images.decoding import MOST_PIXELS, Sides, image_facts, image_size, one_large, open_image, open_mask
from datamodules.images.recipe_images import RecipeImage, recipe_image_of
from datamodules.images.samples import SIDE_MULTIPLE, ImageFile, Sample
from datamodules.images.windows import resize, same_proportions
from foundation.errors import UserError, printable

# Longer side of the small copies, and the pixels that are decoded for them.
SMALL_SIDE, DECODED_AREA = 512, 256**2
# Shift in pixels of the small copies, two pixels of a megapixel image. Blocks agree to a tenth of a pixel.
LEAST_SHIFT = 1.0
# Levels of 255 between the darkest and the brightest pixel of each colour in an image of one colour.
ONE_COLOUR = 8
# Cells per side of the colours in a print.
CELLS = 8
# The 8 lowest frequencies of a discrete cosine transform of 32 pixels.
COSINES = np.cos(np.pi / 32 * np.outer(np.arange(8), np.arange(32) + 0.5))
# Differing bits of 64: recompressed, resized and slightly cropped copies differ by up to 4, other photographs by 20 and
# more. Colours tell equal outlines in other colours apart.
NEAR_BITS, NEAR_COLOURS = 4, 4
# For targets of one control, which several edits share: a small edit changes a cell by about this much.
SAME_BITS, SAME_COLOURS = 2, 2


class Kind(Enum):
    """Kinds of faults, each with its label and remedy, in the order of the report."""

    LEAK = "leak", "learned and held out: remove it from one of the two"
    UNREADABLE = "unreadable", "repair or remove the file"
    INCOMPLETE = "incomplete", "add the missing files, or remove the rest"
    EQUAL = "equal", "nothing to learn: remove it, or find the right file"
    PROPORTION = "proportion", "crop both alike, unless the edit extends the image"
    SHIFTED = "shifted", "align or crop both alike: the shift is learned with the edit"
    SCALED = "scaled", "align or crop both alike: the zoom is learned with the edit"
    NEARLY_EQUAL = "nearly equal", "no more than compression differs: remove it, or find the right file"
    BLANK = "blank", "one colour: find the right file"
    MASK = "mask", "draw it again for this target, or leave it out"
    DUPLICATE = "duplicate", "the same target twice: remove one"
    SMALL = "low resolution", "find a larger original, or train at a lower data.resolution"
    NO_CAPTION = "empty caption", "write one"
    REPLY = "reply", "a model's refusal, reasoning or greeting, not a caption: write one"
    WRAPPED = "wrapped caption", "each line is a caption: write it in one, or set data.caption_per_line=false"

    def __init__(self, label: str, remedy: str) -> None:
        self.label = label
        self.remedy = remedy


class Finding(NamedTuple):
    """A fault of a sample.

    Attributes:
        key: key of the sample, or the rest of an incomplete one.
        figure: the extent, in a few words.
        sample: None for an incomplete one.
        other: the sample that it repeats.
    """

    kind: Kind
    key: str
    figure: str
    sample: Sample | None = None
    other: Sample | None = None


class Print(NamedTuple):
    """A perceptual hash of 64 bits and colours (CELLS, CELLS, 3), by which an image is found again."""

    hash: int
    colours: np.ndarray

    @classmethod
    def of(cls, image: Image.Image) -> "Print":
        """Return the print of an image."""
        grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS), np.float64)
        frequencies = COSINES @ grey @ COSINES.T
        bits = np.packbits(frequencies > np.median(frequencies))
        colours = np.asarray(image.resize((CELLS, CELLS), Image.Resampling.BOX), np.int16)
        return cls(int.from_bytes(bits.tobytes()), colours)


@dataclass(frozen=True)
class Look:
    """A small copy of an image.

    Attributes:
        size: (width, height) of the image.
        small: the copy, of at most `SMALL_SIDE` pixels.
    """

    size: Sides
    small: Image.Image

    @property
    def one_colour(self) -> bool:
        """Whether nothing can be seen."""
        return bool(np.ptp(np.asarray(self.small), axis=(0, 1)).max() <= ONE_COLOUR)

    def print(self) -> Print | None:
        """Return its print; None for one colour."""
        return None if self.one_colour else Print.of(self.small)


class Inspected(NamedTuple):
    """The findings in a sample, and the prints of its target and its control."""

    findings: list[Finding]
    target: Print | None
    control: Print | None


def look(path: ImageFile, mask: bool = False) -> Look:
    """Read an image once.

    Args:
        mask: read the values of a mask, whose sides may have any length.

    Raises:
        UserError: it cannot be read, or a side is shorter than 16 pixels.
    """
    size = image_facts(path).size if mask else image_size(path)
    with one_large(size):
        whole = open_mask(path).convert("RGB") if mask else open_image(path, DECODED_AREA)
    size = whole.size if isinstance(path, RecipeImage) else size  # without a border
    scale = min(1.0, SMALL_SIDE / max(size))
    width, height = (max(1 if mask else SIDE_MULTIPLE, round(side * scale)) for side in size)
    return Look(size, resize(whole, (width, height)))


def nearly_equal(control: Image.Image, target: Image.Image) -> bool:
    """Return whether two images of one size differ by no more than compression makes.

    JPEG of quality 75 changes pixels by up to 5 levels of 255 on average, but the means of blocks by less than 9, the
    mean of the image by less than 0.3, and it adds hardly any edges. An edit changes one of these, however small it is:
    a dot of a fiftieth of the width the mean of a block, a little more light the mean of the image, blurring and noise
    the edges.
    """
    one, other = (np.asarray(image, np.float32) for image in (control, target))
    change = other - one
    height, width = (side // 8 * 8 for side in change.shape[:2])
    blocks = change[:height, :width].reshape(height // 8, 8, width // 8, 8, 3).mean((1, 3))
    if np.abs(change).mean() > 5 or np.abs(change.mean((0, 1))).max() > 0.35 or np.abs(blocks).max(initial=0) > 9:
        return False
    before, after = (float((edges(image.mean(2)) ** 2).sum()) for image in (one, other))
    return 0.85 * before <= after <= 1.05 * before


def inspect_sample(sample: Sample, sides: tuple[int, ...], see: Callable[[ImageFile], Look] = look) -> Inspected:
    """Find the faults of a sample's images and captions.

    Args:
        sides: sides of the squares to whose area it is shrunk in training; empty for its own size.
        see: `look`, or one that remembers.
    """
    seen: dict[ImageFile, Look] = {}
    unreadable: list[tuple[Kind, str]] = []
    for path in (sample.target, *sample.controls, sample.mask, sample.rejected):
        if path is not None:
            try:
                seen[path] = look(path, mask=True) if path == sample.mask else see(path)
            except UserError as error:
                short = str(error).replace(str(path), PurePath(str(path)).name)
                unreadable.append((Kind.UNREADABLE, printable(short)))
    found = [*unreadable, *_faults(sample, seen, sides)]
    if wordless := [prompt for prompt in sample.prompts if not any(map(str.isalpha, prompt))]:
        found.append((Kind.NO_CAPTION, f'no letters in "{wordless[0][:20]}"' if wordless[0] else "no words"))
    found += [(Kind.REPLY, f'"{prompt[:27]}..."') for prompt in sample.prompts if is_reply(prompt)][:1]
    if (line := wrapped_line(sample.prompts)) is not None:
        found.append((Kind.WRAPPED, f'after "...{line[-27:]}"'))
    findings = [Finding(kind, sample.key, figure, sample) for kind, figure in found]
    target, control = seen.get(sample.target), seen.get(sample.controls[0]) if sample.controls else None
    return Inspected(findings, *(None if one is None else one.print() for one in (target, control)))


def _faults(sample: Sample, seen: dict[ImageFile, Look], sides: tuple[int, ...]) -> Iterator[tuple[Kind, str]]:
    controls = [seen[path] for path in sample.controls if path in seen]
    target = seen.get(sample.target)
    if target is not None:
        width, height = target.size
        if target.one_colour:
            yield Kind.BLANK, "target"
        # The least of several sides: a small image may be meant for that one.
        if sides and width * height < min(sides) ** 2 / 2:
            yield Kind.SMALL, f"{width}x{height}, data.resolution={min(sides)}"
    for number, control in enumerate(controls, 1):
        if control.one_colour:
            yield Kind.BLANK, f"control {number}" if len(controls) > 1 else "control"
    if target is None:
        return
    mask, rejected = (seen.get(path) if path else None for path in (sample.mask, sample.rejected))
    if mask and mask.one_colour:
        yield Kind.MASK, "one colour"
    if mask and not same_proportions(mask.size, target.size):
        yield Kind.MASK, _sizes("mask", mask, target)
    if rejected and nearly_equal(resize(rejected.small, target.small.size), target.small):
        yield Kind.NEARLY_EQUAL, "rejected and target"
    if len(controls) == len(sample.controls) > 0:
        yield from _faults_of_pair(sample, target, controls, sides)


def _sizes(name: str, one: Look, target: Look) -> str:
    return f"{name} {one.size[0]}x{one.size[1]}, target {target.size[0]}x{target.size[1]}"


def _faults_of_pair(
    sample: Sample, target: Look, controls: list[Look], sides: tuple[int, ...]
) -> Iterator[tuple[Kind, str]]:
    if isinstance(made := sample.controls[0], RecipeImage):
        changed, unchanged = open_image(made), open_image(made.without_recipe())
        if changed.size == unchanged.size and nearly_equal(changed, unchanged):
            same = not np.any(np.asarray(changed) != np.asarray(unchanged))
            yield Kind.EQUAL if same else Kind.NEARLY_EQUAL, f"control and target, by {made.chain}"
        return
    alike = [index for index, control in enumerate(controls) if same_proportions(control.size, target.size)]
    if not alike:
        yield Kind.PROPORTION, _sizes("control", controls[0], target)
        return
    if target.one_colour:
        return
    for index in alike:
        control = resize(controls[index].small, target.small.size)
        if nearly_equal(control, target.small) and _equal_in_training(sample, index, sides):
            same = not np.any(np.asarray(control) != np.asarray(target.small))
            figure = f"control {index + 1}" if len(controls) > 1 else "control and target"
            yield Kind.EQUAL if same else Kind.NEARLY_EQUAL, figure
            return
    width, height = target.small.size
    control = controls[alike[0]].small
    gray = [np.asarray(resize(one, (width, height)).convert("L"), np.float32) for one in (control, target.small)]
    if (found := align(*gray)) is None:
        return
    distance = float(np.hypot(found.x, found.y))
    if distance >= LEAST_SHIFT:
        ways = [
            f"{abs(pixels):.0f} px {there if pixels > 0 else back}"
            for offset, there, back in ((found.x, "right", "left"), (found.y, "down", "up"))
            if round(pixels := offset * target.size[0] / width)
        ]
        yield Kind.SHIFTED, f"{', '.join(ways)} ({100 * distance / max(width, height):.1f} %)"
    if abs(found.scale - 1) * max(width, height) / 2 >= 2 * LEAST_SHIFT:
        yield Kind.SCALED, f"x {found.scale:.3f}"


def _equal_in_training(sample: Sample, index: int, sides: tuple[int, ...]) -> bool:
    """Return whether a pair is also nearly equal at the size of training, where blur and noise show."""
    area = max(sides) ** 2 if sides else MOST_PIXELS
    target, control = (open_image(path, area) for path in (sample.target, sample.controls[index]))
    return max(target.size) <= SMALL_SIDE or nearly_equal(resize(control, target.size), target)


# Repeated images.


def matches(prints: Sequence[Print | None], others: Sequence[Print | None]) -> Iterator[tuple[int, int, bool]]:
    """Yield (index, index among `others`, same rather than near) of images that look alike.

    If both are one list, each pair is yielded once, the later image first.
    """
    known = [(index, one) for index, one in enumerate(others) if one is not None]
    hashes = np.array([one.hash for _, one in known], np.uint64)
    for index, one in enumerate(prints):
        if one is None:
            continue
        bits = np.bitwise_count(np.uint64(one.hash) ^ hashes)
        for place in np.flatnonzero(bits <= NEAR_BITS):
            other, print = known[place]
            if others is prints and other >= index:
                break
            apart = np.abs(one.colours - print.colours).max()
            if apart <= NEAR_COLOURS:
                yield index, other, bool(apart <= SAME_COLOURS and bits[place] <= SAME_BITS)


def repeated(
    samples: Sequence[Sample], targets: Sequence[Print | None], controls: Sequence[Print | None], held: set[int]
) -> list[Finding]:
    """Find targets that occur twice, and images of held-out samples that are trained on; each sample once.

    One control with several instructions and targets is how sets of edits are made, and so is one pair with several
    instructions: they are no faults if the same files are named.

    Args:
        targets, controls: the print of each sample's target and first control.
        held: indices of the samples that are held out.
    """
    found: dict[int, Finding] = {}

    def add(kind: Kind, index: int, other: int, figure: str) -> None:
        if index not in found or (kind is Kind.LEAK and found[index].kind is not Kind.LEAK):
            one, two = samples[index], samples[other]
            found[index] = Finding(kind, one.key, f"{figure}{two.key}", one, two)

    for index, other, same in matches(targets, targets):
        one, two = samples[index], samples[other]
        same_files = one.target == two.target and one.controls == two.controls
        if one.target == two.target and recipe_image_of(one) and recipe_image_of(two):
            continue
        if same_files and not set(one.prompts) & set(two.prompts):
            continue
        share = one.controls and one.controls[:1] == two.controls[:1]
        if not same and (share or any(matches([controls[index]], [controls[other]]))):
            continue
        if (index in held) == (other in held):
            add(Kind.DUPLICATE, index, other, "as ")
        else:
            add(Kind.LEAK, *((index, other) if index in held else (other, index)), "target as ")
    learned = [None if index in held else one for index, one in enumerate(controls)]
    tested = [one if index in held else None for index, one in enumerate(controls)]
    for index, other, _ in matches(tested, learned):
        if samples[index].controls[:1] != samples[other].controls[:1]:
            add(Kind.LEAK, index, other, "control as ")
    return list(found.values())
