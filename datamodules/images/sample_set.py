"""The samples of a data set: found, and checked against their files and the model."""

from collections.abc import Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datamodules.batch import Size
from datamodules.errors import UserError, listing, printable
from datamodules.images.conditions import ConditionImages, Model
from datamodules.images.roots import RootSetting, as_roots, with_captions
from datamodules.images.sample import Found, Picture, Root, Sample, Source
from datamodules.images.transforms import MOST_PIXELS, floor_size, image_size, verify_image

# Larger pictures are allowed, with a note: pixels, and the ratio of the longer side to the shorter.
LARGE, LONG = 2**22, 8


class Usable(NamedTuple):
    """A sample whose files were checked; `rounded`: whether a side is rounded down to a multiple of 16."""

    sample: Sample
    size: Size
    rounded: bool


class SampleSet:
    """The samples of data.root and data.val_root.

    Args:
        root, val_root: a folder or a metadata table, or a list of them, or of mappings with `path` and settings of
            `Root`; val_root's samples are held out.
        source: finds the samples of some roots; see `datamodules.images.sources` and `datamodules.images.captions`.
        on_missing: what to do about a target without control or caption, or a control without target.
        on_bad_image: what to do about an image that cannot be read or is smaller than 16 pixels.
        settings: of each `Root` that does not set its own.

    Attributes:
        held_out: the samples of val_root, once `find` has been called.
        incomplete: a line about each sample that is not complete, once `find` has been called.
        notes: what was skipped, each in one line.
    """

    def __init__(
        self,
        root: RootSetting,
        val_root: RootSetting,
        source: Source,
        on_missing: Literal["error", "skip"],
        on_bad_image: Literal["error", "skip"],
        **settings: Any,
    ) -> None:
        for name, value in (("on_missing", on_missing), ("on_bad_image", on_bad_image)):
            if value not in ("error", "skip"):
                raise UserError(f"data.{name}={value}: choose error or skip")
        self.roots = as_roots("root", root, settings)
        self.val_roots = as_roots("val_root", val_root, settings)
        self.source = source
        self.on_missing = on_missing
        self.on_bad_image = on_bad_image
        self.model = ""
        self.condition_images = ConditionImages()
        self.held_out: set[Sample] = set()
        self.incomplete: list[str] = []
        self.notes: list[str] = []

    def configure_for(self, model: Model) -> None:
        """Check and load condition images as this model takes them."""
        self.model, self.condition_images = model.base.name, model.condition_images

    def require_root(self) -> None:
        """Raise a UserError where no data is named."""
        if not self.roots:
            raise UserError("no data to train on: give data.root=FOLDER, or data=shapes for drawn examples")

    def require_some(self, usable: Sized) -> None:
        """Raise a UserError where no sample is usable."""
        if not usable:
            raise UserError(f"data.root={listing(self.paths)}: no usable pair is left")

    @property
    def paths(self) -> list[str]:
        """The roots, for messages."""
        return [str(root.path) for root in self.roots]

    @property
    def val_paths(self) -> list[str]:
        """Those that are held out, for messages."""
        return [str(root.path) for root in self.val_roots]

    def root(self, sample: Sample) -> Root:
        """Whose sample it is."""
        return [*self.roots, *self.val_roots][sample.root]

    def find(self) -> list[Sample]:
        """The complete samples, those of val_root last; incomplete ones become a note.

        Raises:
            UserError: some are incomplete, unless on_missing is `skip`; or the model takes fewer or more condition
                images than they have.
        """
        self.require_root()
        found = with_captions(self.source(self.roots), self.roots)
        if self.val_roots:
            found = self._with_held_out(found)
        self.notes.clear()
        self.incomplete = found.incomplete
        if found.incomplete:
            what = f"{len(found.incomplete)} incomplete: {listing(found.incomplete)}"
            if self.on_missing == "error":
                raise UserError(f"{what}. Complete them, or pass data.on_missing=skip")
            self.notes.append(f"skipped {what}")
        self._check_counts(found.samples)
        return found.samples

    def _with_held_out(self, found: Found) -> Found:
        """The samples of root and of val_root; a target of both is held out."""
        try:
            held_out = with_captions(self.source(self.val_roots), self.val_roots)
        except UserError as error:  # sources speak of data.root
            raise UserError(str(error).replace("data.root=", "data.val_root=")) from error
        below = len(self.roots)
        held_out = replace(held_out, samples=[replace(one, root=one.root + below) for one in held_out.samples])
        taken = {sample.key for sample in found.samples}
        if any(sample.key in taken for sample in held_out.samples):  # keys must be unique
            renamed = [replace(sample, key=f"held_out/{sample.key}") for sample in held_out.samples]
            held_out = replace(held_out, samples=renamed)
        self.held_out = set(held_out.samples)
        targets = {_place(sample.target) for sample in held_out.samples}
        learned = [sample for sample in found.samples if _place(sample.target) not in targets]
        passed_over = found.passed_over + held_out.passed_over
        return Found([*learned, *held_out.samples], found.incomplete + held_out.incomplete, passed_over)

    def _check_counts(self, samples: Sequence[Sample]) -> None:
        """Raise a UserError where the model takes fewer or more condition images."""
        most = self.condition_images.most
        if most == 0 and (some := [sample.key for sample in samples if sample.controls]):
            raise UserError(
                f"{self.model} makes pictures from text alone, but {listing(some)} of data.root={self.paths[0]} have "
                "condition images: choose a model that edits (model=flux_kontext, qwen_image_edit), or train on the "
                "targets alone with data=captions and their folder as data.root"
            )
        if most != 0 and (bare := [sample.key for sample in samples if not sample.controls]):
            raise UserError(
                f"{self.model} edits pictures, but {listing(bare)} of data.root={self.paths[0]} have no condition "
                "image: use data=cached with pairs, or model=flux_dev with data=captions"
            )
        if most and (many := [f"{s.key} ({len(s.controls)})" for s in samples if len(s.controls) > most]):
            raise UserError(
                f"{self.model} takes at most {self.condition_images.limit}, but {listing(many)} of "
                f"data.root={self.paths[0]} have more"
            )

    def check(self, samples: Sequence[Sample]) -> list[Usable]:
        """Those whose files can be used.

        Raises:
            UserError: some are unusable, unless on_bad_image is `skip`.
        """
        with ThreadPoolExecutor() as pool:
            checked = list(pool.map(partial(_check, self.condition_images), samples))
        bad = [printable(str(one)) for one in checked if isinstance(one, UserError)]
        if bad:
            what = f"{len(bad)} unusable: {listing(bad)}"
            if self.on_bad_image == "error":
                raise UserError(f"{what}. Repair or remove them, or pass data.on_bad_image=skip")
            self.notes.append(f"skipped {what}")
        return [one for one in checked if not isinstance(one, UserError)]


def _place(picture: Picture) -> Picture:
    """One name for all names of a picture."""
    return picture.resolve() if isinstance(picture, Path) else picture


def _check(condition_images: ConditionImages, sample: Sample) -> Usable | UserError:
    """The sample's size, or what is wrong with one of its files."""
    try:
        images = (sample.target, *sample.controls)
        target, *controls = [image_size(path) for path in images]
        own = [target, *(controls if condition_images.vae_image_size is None else [])]
        for path, size in zip(images, own, strict=False):
            _refuse_large(path, *size)
        for path in (*images, *([sample.mask] if sample.mask else [])):
            verify_image(path)
    except UserError as error:
        return error
    sizes = (floor_size(*target), *(condition_images.size(*control) for control in controls))
    return Usable(sample, (sizes, sample.mask is not None), any(floor_size(*size) != size for size in own))


def _refuse_large(path: Picture, width: int, height: int) -> None:
    """Raise a UserError for a picture whose training step would take hundreds of gigabytes."""
    if width * height > MOST_PIXELS:
        raise UserError(
            f"the image {path} is {width}x{height}, {width * height / 1e6:.1f} megapixels: training "
            f"takes at most {MOST_PIXELS / 1e6:.1f}; shrink it"
        )


def unusual(prompts: Sequence[str], sizes: Sequence[Size], rounded: int, noun: str) -> list[str]:
    """Notes on what is allowed, but may be a mistake.

    Args:
        rounded: how many samples have a side that is rounded down.
        noun: what the samples are.
    """
    notes: list[str] = []
    if empty := sum(not prompt for prompt in prompts):
        notes.append(f"{empty} captions are empty")
    if rounded:
        notes.append(f"{rounded} {noun} have sides rounded down to a multiple of 16")
    if large := sum(any(width * height > LARGE for width, height in images) for images, _ in sizes):
        notes.append(
            f"{large} {noun} have more than {LARGE / 1e6:.0f} megapixels: task=dry_run estimates what a step "
            "with them takes, shrunk ones take less"
        )
    if long := sum(any(max(size) > LONG * min(size) for size in images) for images, _ in sizes):
        notes.append(f"{long} {noun} are more than {LONG} times as long as wide")
    return notes
