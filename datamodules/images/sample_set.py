"""The samples of a data set: found, checked against their files and the model, described, and partly held out."""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datamodules.images.decoding import Facts, image_facts, refuse_large, require_sides, verify_image, verify_mask
from datamodules.images.recipe_images import RecipeImage, recipe_image_of, source_of, with_controls, with_exchanges
from datamodules.images.resizing import Framing, Sides, View
from datamodules.images.samples import Found, ImageFile, Root, RootSetting, Sample, Source, as_roots, with_settings
from datamodules.images.windows import ConditionImages
from foundation.errors import UserError, count_of, listing, printable
from foundation.files import Packed


class Usable(NamedTuple):
    """A sample whose files were checked.

    Attributes:
        facts: facts of its target and its controls.
        white_mask: its mask is white all over.
    """

    sample: Sample
    facts: Sequence[Facts]
    white_mask: bool = False

    @property
    def sizes(self) -> list[Sides]:
        """(width, height) of each image, upright."""
        return [one.size for one in self.facts]


class SampleSet:
    """The samples of data.root and data.val_root.

    Args:
        root, val_root: where samples are (docs/data.md), or a list of these, or of mappings with `path` and settings of
            `Root`. The samples of val_root are held out.
        source: finds the samples of roots; see `datamodules.images.sources`.
        on_missing: for a target without control or caption, or a control without target.
        on_bad_image: for an image that cannot be read or is smaller than 16 pixels.
        framing: how samples become views.
        seed: determines the condition images that recipes make.
        settings: settings of each `Root` that does not set its own.
    """

    def __init__(
        self,
        root: RootSetting,
        val_root: RootSetting,
        source: Source,
        on_missing: Literal["error", "skip"],
        on_bad_image: Literal["error", "skip"],
        framing: Framing,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        for name, value in (("on_missing", on_missing), ("on_bad_image", on_bad_image)):
            if value not in ("error", "skip"):
                raise UserError(f"data.{name}={value}: choose error or skip")
        roots, held_out = as_roots("root", root, settings), as_roots("val_root", val_root, settings)
        others = tuple(str(one.path) for one in (*roots, *held_out))
        self.roots, self.val_roots = ([replace(one, others=others) for one in some] for some in (roots, held_out))
        self.source = source
        self.on_missing = on_missing
        self.on_bad_image = on_bad_image
        self.model = ""
        self.framing = framing
        self.seed = seed
        self.condition_images = ConditionImages()
        self._found: Found | None = None

    def configure_for(self, model: str, condition_images: ConditionImages, multiple: int) -> None:
        """Check and load images as a model takes them; `multiple` as for `Framing`."""
        self.model, self.condition_images = model, condition_images
        self.framing = replace(self.framing, multiple=multiple, condition_images=condition_images)

    @property
    def paths(self) -> list[str]:
        return [str(root.path) for root in self.roots]

    def root(self, sample: Sample) -> Root:
        return [*self.roots, *self.val_roots][sample.root]

    def outside(self, samples: Iterable[Sample]) -> set[str]:
        """Return the keys of samples with a file that is not below their root, or only by a link."""

        def is_outside(sample: Sample) -> bool:
            place = Path(self.root(sample).path).resolve()
            top = place if place.is_dir() else place.parent
            files = (sample.target, *sample.controls, sample.mask, sample.rejected, sample.caption_file)
            return not all(one.resolve().is_relative_to(top) for one in files if isinstance(one, Path))

        return {sample.key for sample in samples if is_outside(sample)}

    def is_held_out(self, sample: Sample) -> bool:
        """Return whether a sample is of val_root."""
        return sample.root >= len(self.roots)

    def views(self, usable: Usable) -> list[View]:
        """Return all views of a sample; of one of val_root only the first."""
        sample = usable.sample
        return self.framing.views(sample, self.root(sample), usable.sizes, self.is_held_out(sample))

    def require_root(self) -> None:
        """Raise a UserError if no data is configured."""
        if not self.roots:
            raise UserError("no data to train on: give data.root=FOLDER, or data=sunset for an example")

    def scan(self) -> Found:
        """Return the samples of root, then those of val_root; each process looks for them once.

        Raises:
            UserError: no data is configured, or a root does not exist or holds no samples.
        """
        self.require_root()
        if self._found is None:
            found = self._samples(self.roots)
            self._found = self._with_held_out(found) if self.val_roots else found
        return self._found

    def _samples(self, roots: list[Root]) -> Found:
        bare = [replace(root, require_prompt=root.control is None) for root in roots]
        return with_exchanges(with_settings(with_controls(self.source(bare), roots, self.seed), roots), roots)

    def _with_held_out(self, found: Found) -> Found:
        """Add the samples of val_root; a target of both is held out."""
        try:
            held_out = self._samples(self.val_roots)
        except UserError as error:  # sources name data.root
            raise UserError(str(error).replace("data.root=", "data.val_root=")) from error
        taken = {sample.key for sample in found.samples}
        prefix = "held_out/" if any(sample.key in taken for sample in held_out.samples) else ""  # keys must be unique
        below = len(self.roots)
        samples = [replace(one, key=prefix + one.key, root=one.root + below) for one in held_out.samples]
        names = {name for sample in samples for name in _names(sample)}
        learned = [sample for sample in found.samples if names.isdisjoint(_names(sample))]
        return replace(found, samples=learned).plus(replace(held_out, samples=samples))

    def find(self) -> Found:
        """Return the complete samples, as `scan`; the notes name incomplete ones.

        Raises:
            UserError: some are incomplete, unless on_missing is `skip`; or the model takes fewer or more condition
                images than they have.
        """
        found = self.scan()
        if found.samples and found.without_controls and not any(sample.controls for sample in found.samples):
            raise UserError(found.without_controls)
        most, least, data = self.condition_images.most, self.condition_images.least, f"of data.root={self.paths[0]}"
        if most == 0 and (some := [one.key for one in found.samples if one.controls]):
            raise UserError(
                f"{self.model} makes images from text only, but {listing(some)} {data} have condition images: choose a "
                "model that edits (model=flux_kontext, flux2_klein_4b, qwen_image_edit, krea2_edit), or train on the "
                "targets only, with data=captions and their folder as data.root"
            )
        bare = [one.key for one in found.samples if not one.controls] if least else []
        if bare and len(bare) == len(found.samples):
            raise UserError(
                f"{self.model} edits images, but {listing(bare)} {data} have no condition image: use data=cached with "
                "pairs, or model=flux_dev, qwen_image, z_image or krea2 with data=captions"
            )
        if most and (many := [f"{one.key} ({len(one.controls)})" for one in found.samples if len(one.controls) > most]):
            limit = self.condition_images.limit
            raise UserError(f"{self.model} takes at most {limit}, but {listing(many)} {data} have more")
        lines = [*found.incomplete, *(f"{key} has no condition image, which {self.model} needs" for key in bare)]
        hint = "" if found.samples else ", or make pairs from images alone with data.control=jpeg (docs/data.md)"
        notes = self._without(lines, "incomplete", "on_missing", f"Complete them{hint}")
        samples = [one for one in found.samples if len(one.controls) >= least]
        for root in (root for root in self.roots if root.control):
            first = next((one for one in samples if self.root(one) is root), None)
            made = "targets" if first and isinstance(first.target, RecipeImage) else "condition images"
            prompts = printable(" | ".join(first.prompts[:3])) if first else ""
            notes.append(f"{root}: the {made} are made by {root.control}; instructions: {prompts}")
        if several := [one for one in samples if len(one.prompts) > 1 and recipe_image_of(one) is None]:
            example = " | ".join(f'"{prompt[:40]}"' for prompt in several[0].prompts[:3])
            notes.append(
                f"{count_of(len(several), 'samples have several captions')}, of which each step draws one, as "
                f"{several[0].key}: {printable(example)}. data.caption_per_line=false makes a text file one caption"
            )
        return replace(found, samples=samples, notes=(*notes, *found.notes))

    def find_uncaptioned_too(self) -> Found:
        """Return the samples of data.root with captions as they are stored, or none: for a model that writes captions.

        Raises:
            UserError: some lack more than a caption, unless on_missing is `skip`.
        """
        self.require_root()
        found = self.source([replace(root, require_prompt=False) for root in self.roots])
        notes = self._without(found.incomplete, "incomplete", "on_missing", "Complete them")
        return replace(found, notes=(*notes, *found.notes))

    def _without(self, lines: list[str], fault: str, setting: str, remedy: str) -> list[str]:
        """Return a note that samples are left out, if any are; raise a UserError instead unless configured to skip."""
        if not lines:
            return []
        what = f"{len(lines)} {fault}: {listing(lines)}"
        if getattr(self, setting) == "error":
            raise UserError(f"{what}. {remedy}, or pass data.{setting}=skip")
        return [f"skipped {what}"]

    def check(self, samples: Sequence[Sample]) -> tuple[list[Usable], list[str]]:
        """Open the files of samples; return the usable ones, and a note about the others.

        Raises:
            UserError: some are unusable, unless on_bad_image is `skip`.
        """
        checked = self.check_each(samples)
        bad = [printable(str(one)) for one in checked if isinstance(one, UserError)]
        notes = self._without(bad, "unusable", "on_bad_image", "Repair or remove them")
        return [one for one in checked if not isinstance(one, UserError)], notes

    def check_each(self, samples: Sequence[Sample]) -> list[Usable | UserError]:
        """Open the files of samples; return each with the facts of its images, or the error of one of its files."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self._check_files, samples))

    def _check_files(self, sample: Sample) -> Usable | UserError:
        """Return the sample with the facts of its images, or the error of one of its files."""
        images = (sample.target, *sample.controls)
        fixed = self.condition_images.vae_image_size
        try:
            facts = [image_facts(path) for path in images]
            for path, one in zip(images, facts, strict=True):
                require_sides(path, *one.size)
            if not self.root(sample).resolution:
                for path, one in zip(images, facts[: 1 if fixed else None], strict=False):
                    refuse_large(path, *one.size)
            if sample.rejected and (other := image_facts(sample.rejected).size) != facts[0].size:
                by = " and ".join(f"{width}x{height}" for width, height in (other, facts[0].size))
                raise UserError(f"the rejected image {sample.rejected} and its target are {by}: give both one size")
            for path in (*images, *(one for one in (sample.mask, sample.rejected) if one)):
                if not isinstance(path, RecipeImage):  # of one that is verified
                    verify_image(path)
            return Usable(sample, facts, sample.mask is not None and verify_mask(sample.mask))
        except UserError as error:
            return error

    def held_out(
        self,
        samples: Sequence[Sample],
        count: int,
        noun: str,
        checksum: Callable[[ImageFile], str | None] = lambda image: None,
    ) -> set[int]:
        """Return the indices of the samples to hold out: those of val_root, or `count` others.

        Args:
            noun: name of the samples in messages.
            checksum: returns the known sha256 of an image; unknown ones are read.

        Raises:
            UserError: no sample is left to train on.
        """
        named = {index for index, sample in enumerate(samples) if self.is_held_out(sample)}
        if named and len(named) == len(samples):
            paths = listing([str(root.path) for root in self.val_roots])
            raise UserError(
                f"data.val_root={paths} has all {len(samples)} {noun} of data.root: none is left to train on"
            )
        if not count:
            return named

        @cache
        def identity(image: ImageFile) -> Hashable:
            """Return the path of a file, the content of a packed image: tables repeat one for each instruction."""
            if not isinstance(image := source_of(image), Packed):
                return _resolved(image)
            return checksum(image) or hashlib.sha256(image.read_bytes()).hexdigest()

        groups = [frozenset(map(identity, (sample.target, *sample.controls))) for sample in samples]
        return choose_held_out([sample.key for sample in samples], groups, count, noun)


def _resolved(image: ImageFile) -> ImageFile:
    """Return one name for all names of an image."""
    return image.resolve() if isinstance(image, Path) else image


def _names(sample: Sample) -> tuple[Hashable, Hashable]:
    """Return the names of a target and of its pair, which is the same pair the other way round."""
    target, *controls = (_resolved(source_of(one)) for one in (sample.target, *sample.controls))
    return target, frozenset((target, *controls))


def choose_held_out(keys: Sequence[str], groups: Sequence[Hashable], count: int, noun: str) -> set[int]:
    """Return the indices of at least `count` samples, whatever the seed of the run.

    Args:
        groups: the group of each sample; the samples of a group (other instructions for the same images, source and
            target exchanged) are held out together.

    Raises:
        UserError: no sample is left to train on.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    order = sorted(members.values(), key=lambda indices: hashlib.sha256(keys[indices[0]].encode()).digest())
    held: set[int] = set()
    for indices in order:
        if len(held) < count:
            held.update(indices)
    if held and len(held) == len(keys):
        most = len(keys) - len(order[-1])
        remedy = f"at most data.val_count={most}" if most else "leave it out: all of them share the same images"
        raise UserError(f"data.val_count={count} of {len(keys)} {noun} leaves none to train on: {remedy}")
    return held
