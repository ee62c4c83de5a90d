"""The samples of a data set: found, and checked against their files and the model."""

import hashlib
from collections.abc import Callable, Hashable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

from datamodules.errors import UserError, count_of, listing, printable
from datamodules.files import Packed
from datamodules.images.decoding import Facts, image_facts, refuse_large, require_sides, require_size, verify_image
from datamodules.images.framing import Framing, View
from datamodules.images.samples import (
    Found,
    Picture,
    Root,
    RootSetting,
    Sample,
    Source,
    as_roots,
    place,
    refuse_unused,
    with_settings,
)
from datamodules.images.windows import ConditionImages


class Usable(NamedTuple):
    """A sample whose files were checked.

    Attributes:
        facts: of its target and its controls.
    """

    sample: Sample
    facts: Sequence[Facts]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(width, height) of each, upright."""
        return [(one.width, one.height) for one in self.facts]


class SampleSet:
    """The samples of data.root and data.val_root.

    Args:
        root, val_root: where samples are (docs/data.md), or a list of that, or of mappings with `path` and settings
            of `Root`; val_root's samples are held out.
        source: finds the samples of some roots; see `datamodules.images.sources` and `datamodules.images.captions`.
        on_missing: what to do about a target without control or caption, or a control without target.
        on_bad_image: what to do about an image that cannot be read or is smaller than 16 pixels.
        framing: how samples become views.
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
        framing: Framing,
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
        self.framing = framing
        self.condition_images = ConditionImages()
        self.held_out: set[Sample] = set()
        self.incomplete: list[str] = []
        self._found: Found | None = None
        self.notes: list[str] = []

    def configure_for(
        self, model: str, condition_images: ConditionImages, multiple: int, preferred: tuple[tuple[int, int], ...]
    ) -> None:
        """Check and load images as a model takes them.

        Args:
            model: its name, for messages.
            multiple, preferred: see `Framing`.
        """
        self.model, self.condition_images = model, condition_images
        self.framing = replace(self.framing, multiple=multiple, preferred=preferred, condition_images=condition_images)
        if self.framing.buckets == "family":
            self._check_preferred()

    def _check_preferred(self) -> None:
        """Raise a UserError where the sizes that the model prefers are not those that are asked for."""
        if not self.framing.preferred:
            raise UserError(f"data.buckets=family: {self.model} prefers no sizes; choose aspect")
        own = min(max(size) for size in self.framing.preferred)  # the square's
        sides = {side for root in [*self.roots, *self.val_roots] for side in root.resolution}
        if strange := [side for side in sides if not 0.9 < side / own < 1.1]:
            raise UserError(
                f"data.buckets=family: {self.model} prefers sizes of about {own}x{own} pixels, and data.resolution is "
                f"{strange[0]}; choose aspect"
            )

    def views(self, usable: Usable) -> list[View]:
        """All that training sees of a sample; of one of val_root only the first."""
        sample = usable.sample
        return self.framing.views(sample, self.root(sample), usable.sizes, sample in self.held_out)

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
        found = self.scan()
        refuse_unused([*self.roots, *self.val_roots], found.forms)
        self.notes.clear()
        self.incomplete = found.incomplete
        self._pass_over(found.incomplete)
        if found.passed_over:
            what = count_of(found.passed_over, "files of the system (hidden, Thumbs.db, __MACOSX)")
            self.notes.append(f"passed over {what}")
        self.notes += found.notes
        self._check_counts(found.samples)
        return found.samples

    def find_uncaptioned_too(self) -> list[Sample]:
        """The samples of data.root, some with no prompts, and the prompts as they stand there: for who writes captions.

        Raises:
            UserError: some lack more than a caption, unless on_missing is `skip`.
        """
        self.require_root()
        found = self.source([replace(root, require_prompt=False) for root in self.roots])
        if not self.val_roots:  # these are not looked at, and may use it
            refuse_unused(self.roots, found.forms)
        self._pass_over(found.incomplete)
        return found.samples

    def _pass_over(self, incomplete: list[str]) -> None:
        if not incomplete:
            return
        what = f"{len(incomplete)} incomplete: {listing(incomplete)}"
        if self.on_missing == "error":
            raise UserError(f"{what}. Complete them, or pass data.on_missing=skip")
        self.notes.append(f"skipped {what}")

    def scan(self) -> Found:
        """Look for the samples, once in a process: of many files, or on a slow disk, it takes long.

        Raises:
            UserError: no data is named, or a root does not exist or holds none.
        """
        self.require_root()
        self._found = self._found or self._scan()
        return self._found

    def _scan(self) -> Found:
        found = with_settings(self.source(self.roots), self.roots)
        return self._with_held_out(found) if self.val_roots else found

    def _with_held_out(self, found: Found) -> Found:
        """The samples of root and of val_root; a target of both is held out."""
        try:
            held_out = with_settings(self.source(self.val_roots), self.val_roots)
        except UserError as error:  # sources speak of data.root
            raise UserError(str(error).replace("data.root=", "data.val_root=")) from error
        below = len(self.roots)
        held_out = replace(held_out, samples=[replace(one, root=one.root + below) for one in held_out.samples])
        taken = {sample.key for sample in found.samples}
        if any(sample.key in taken for sample in held_out.samples):  # keys must be unique
            renamed = [replace(sample, key=f"held_out/{sample.key}") for sample in held_out.samples]
            held_out = replace(held_out, samples=renamed)
        self.held_out = set(held_out.samples)
        targets = {place(sample.target) for sample in held_out.samples}
        learned = [sample for sample in found.samples if place(sample.target) not in targets]
        passed_over = found.passed_over + held_out.passed_over
        incomplete, forms = found.incomplete + held_out.incomplete, found.forms + held_out.forms
        return Found([*learned, *held_out.samples], incomplete, passed_over, forms, found.notes + held_out.notes)

    def _check_counts(self, samples: Sequence[Sample]) -> None:
        """Raise a UserError where the model takes fewer or more condition images."""
        most = self.condition_images.most
        if most == 0 and (some := [sample.key for sample in samples if sample.controls]):
            raise UserError(
                f"{self.model} makes pictures from text alone, but {listing(some)} of data.root={self.paths[0]} have "
                "condition images: choose a model that edits (model=flux_kontext, flux2_klein_4b, qwen_image_edit), or "
                "train on the targets alone with data=captions and their folder as data.root"
            )
        if most != 0 and (bare := [sample.key for sample in samples if not sample.controls]):
            raise UserError(
                f"{self.model} edits pictures, but {listing(bare)} of data.root={self.paths[0]} have no condition "
                "image: use data=cached with pairs, or model=flux_dev, qwen_image or z_image with data=captions"
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
            checked = list(pool.map(self._check, samples))
        bad = [printable(str(one)) for one in checked if isinstance(one, UserError)]
        if bad:
            what = f"{len(bad)} unusable: {listing(bad)}"
            if self.on_bad_image == "error":
                raise UserError(f"{what}. Repair or remove them, or pass data.on_bad_image=skip")
            self.notes.append(f"skipped {what}")
        return [one for one in checked if not isinstance(one, UserError)]

    def _check(self, sample: Sample) -> Usable | UserError:
        """The sample with its pictures' sizes, or what is wrong with one of its files."""
        images = (sample.target, *sample.controls)
        fixed = self.condition_images.vae_image_size
        try:
            facts = [image_facts(path) for path in images]
            sizes = [(one.width, one.height) for one in facts]
            for path, size in zip(images, sizes, strict=True):
                require_sides(path, *size)
            if not self.root(sample).resolution:
                for path, size in zip(images, sizes[: 1 if fixed else None], strict=False):
                    refuse_large(path, *size)
            if sample.rejected:
                require_size(sample.rejected, sizes[0])
            for path in (*images, *(one for one in (sample.mask, sample.rejected) if one)):
                verify_image(path)
        except UserError as error:
            return error
        return Usable(sample, facts)


def held_out_of(
    sample_set: SampleSet,
    samples: Sequence[Sample],
    count: int,
    noun: str,
    checksum: Callable[[Picture], str | None] = lambda picture: None,
) -> set[int]:
    """The numbers of the samples to hold out: those of data.val_root, or `count` others; see `choose_held_out`.

    Args:
        checksum: the sha256 of a picture, where it is remembered; else it is read.
    """
    keys = [sample.key for sample in samples]
    named = {number for number, sample in enumerate(samples) if sample in sample_set.held_out}
    shown = shown_pictures(samples, count, checksum)
    return choose_held_out(keys, shown, named, sample_set.val_paths, count, noun)


def shown_pictures(
    samples: Sequence[Sample], count: int, checksum: Callable[[Picture], str | None] = lambda picture: None
) -> Sequence[Hashable]:
    """For each sample what its pictures are known by, as `choose_held_out` groups them.

    Files are known by their places. What stands inside of a larger file is known by its bytes: tables have a picture
    once for each of its instructions.

    Args:
        count: data.val_count; without it nothing is read, and each sample is a group of its own.
        checksum: as for `held_out_of`.
    """
    if count == 0:
        return range(len(samples))

    @cache
    def known_by(picture: Picture) -> Hashable:
        if not isinstance(picture, Packed):
            return place(picture)
        return checksum(picture) or hashlib.sha256(picture.read()).hexdigest()

    return [frozenset(map(known_by, (sample.target, *sample.controls))) for sample in samples]


def choose_held_out(
    keys: Sequence[str], pictures: Sequence[Hashable], named: set[int], val_roots: list[str], count: int, noun: str
) -> set[int]:
    """The numbers of the samples to hold out; the choice does not depend on the run's seed.

    Args:
        keys: the samples' names.
        pictures: for each sample its pictures; samples that share them (other instructions, source and target
            exchanged) are held out together.
        named: the samples of data.val_root, which are all held out.
        val_roots: data.val_root.
        count: data.val_count; a few more are held out where samples share their pictures.
        noun: what the samples are.

    Raises:
        UserError: none is left to train on.
    """
    held = set(named)
    if held and len(held) == len(keys):
        raise UserError(
            f"data.val_root={listing(val_roots)} has all {len(keys)} {noun} of data.root: none is left to train on"
        )
    if count == 0:
        return held
    first: dict[Hashable, int] = {}
    more: dict[Hashable, list[int]] = {}  # few: a list for each of a million samples would take seconds
    for index, one in enumerate(pictures):
        if first.setdefault(one, index) != index:
            more.setdefault(one, []).append(index)
    order = sorted(first, key=lambda one: hashlib.sha256(keys[first[one]].encode()).digest())
    for one in order:
        if len(held) < count:
            held.update([first[one], *more.get(one, [])])
    if held and len(held) == len(keys):
        most = len(keys) - 1 - len(more.get(order[-1], []))
        remedy = f"at most data.val_count={most}" if most else "leave it out: all of them share the same pictures"
        raise UserError(f"data.val_count={count} of {len(keys)} {noun} leaves none to train on: {remedy}")
    return held
