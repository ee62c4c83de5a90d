"""The samples of data.root in a cache, and their names there."""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from datamodules.images.decoding import Facts
from datamodules.images.recipe_images import RecipeImage
from datamodules.images.resizing import View
from datamodules.images.sample_set import SampleSet, Usable
from datamodules.images.samples import SIDE_MULTIPLE, Alpha, ImageFile, Sample
from datamodules.shards.cache import CACHE_REMEDY, Cache
from datamodules.shards.reader import EncodedSample, index_of
from datamodules.shards.tar import prompt_id, sample_id
from foundation.files import reading
from foundation.hashes import FileHashes


def roles(sample: Sample) -> list[tuple[str, ImageFile]]:
    """Return the files of a sample, each with its role: target, control, mask or rejected."""
    controls = (("control", path) for path in sample.controls)
    files = (("target", sample.target), *controls, ("mask", sample.mask), ("rejected", sample.rejected))
    return [(role, path) for role, path in files if path is not None]


class Content(NamedTuple):
    """The remembered facts of a sample's files.

    Attributes:
        checksums: (role, sha256) of each; a suffix of the checksum tells how its colours are read.
        usable: the sample with the sizes of its images.
    """

    checksums: list[tuple[str, str]]
    usable: Usable

    @classmethod
    def of(cls, sample: Sample, hashes: FileHashes) -> "Content | None":
        """Return the content of a sample; None if a file is new, has changed, or is too small."""
        files = [(role, hashes.known(path)) for role, path in roles(sample)]
        known = [(role, hashed) for role, hashed in files if hashed is not None]
        if len(known) < len(files):
            return None
        facts = [Facts(*hashed[5:-1]) for _, hashed in known]
        usable = Usable(sample, facts[: 1 + len(sample.controls)], any(hashed[-1] for _, hashed in known))
        if any(min(size) < SIDE_MULTIPLE for size in usable.sizes):  # it cannot be used
            return None
        read_as = [one.colours for one in facts]
        if sample.mask is not None:  # its values are no colours
            read_as[1 + len(sample.controls)] = "alpha" if isinstance(sample.mask, Alpha) else ""
        for index, (_, path) in enumerate(roles(sample)):
            read_as[index] += path.recipe if isinstance(path, RecipeImage) else ""
        return cls([(role, hashed[4] + how) for (role, hashed), how in zip(known, read_as, strict=True)], usable)

    def id(self, view: View) -> str:
        """Return the name of a view of the sample in a cache."""
        return sample_id(view.sample.prompts, self.checksums, view.place)

    def images(self, view: View) -> list[str]:
        """Return the identity of each condition image in a view."""
        controls = [checksum for role, checksum in self.checksums if role == "control"]
        place = [] if view.place == view.windows else [view.place]
        return [json.dumps([*one, *place]) for one in zip(controls, view.windows[1:], strict=True)]


class Entry(NamedTuple):
    """A view, and the conditioning that a cache holds for it.

    Attributes:
        id: name of the view in the cache.
        number: its index among the views of the sample.
        preserved: names of the conditioning by preserve prompt, without the empty prompt, which every sample has.
    """

    view: View
    id: str
    number: int
    preserved: Mapping[str, str]

    @property
    def names(self) -> set[str]:
        """Names in the cache: of the view and of its conditioning."""
        return {self.id, *self.preserved.values()}


def entries_of(
    sample_set: SampleSet, samples: Iterable[Sample], hashes: FileHashes, preserve_prompts: Sequence[str]
) -> Iterator[tuple[Sample, Usable | None, list[Entry]]]:
    """Yield samples with their views in a cache; without views if a file is new or has changed."""
    others = [prompt for prompt in preserve_prompts if prompt]
    sees = sample_set.condition_images.text_sees_them
    shared = {prompt: prompt_id("prompt", prompt) for prompt in others}
    for sample in samples:
        content = Content.of(sample, hashes)
        if content is None:
            yield sample, None, []
            continue
        entries = []
        views = {content.id(view): view for view in sample_set.views(content.usable)}
        for number, (id, view) in enumerate(views.items()):
            images = content.images(view) if sees else []
            preserved = {prompt: prompt_id("prompt", prompt, images) for prompt in others} if sees else shared
            entries.append(Entry(view, id, number, preserved))
        yield sample, content.usable, entries


class CachedSamples(NamedTuple):
    """The samples that are in a cache.

    Attributes:
        usable: samples with all of their views.
        missing: the others.
        encoded: each view by the sample's key and its place.
    """

    usable: list[Usable]
    missing: list[Sample]
    encoded: dict[Hashable, EncodedSample]


def look_up(
    sample_set: SampleSet, samples: Iterable[Sample], cache: Cache, hashes: FileHashes, preserve_prompts: Sequence[str]
) -> CachedSamples:
    """Find samples in a cache.

    Raises:
        UserError: its index is damaged.
    """
    with reading(cache.folder, CACHE_REMEDY):
        index = index_of(cache.rows())
    found = CachedSamples([], [], {})
    known = index.samples.keys() | index.prompts.keys()
    for sample, usable, entries in entries_of(sample_set, samples, hashes, preserve_prompts):
        if usable is None or not all(entry.names <= known for entry in entries):
            found.missing.append(sample)
            continue
        found.usable.append(usable)
        for view, id, _, preserved in entries:
            encoded = index.samples[id]._replace(key=sample.key, captions=sample.prompts, weight=view.weight)
            if preserve_prompts:
                places = (index.prompts[preserved[text]] if text else encoded.empty_prompt for text in preserve_prompts)
                encoded = encoded.preserving(list(places))
            found.encoded[sample.key, view.place] = encoded
    return found
