"""The samples that are missing from a cache, to be encoded by trainer.predict."""

import json
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils.data import DataLoader, Dataset

from datamodules.base import PromptData
from datamodules.batch import PromptRequest, RawBatch
from datamodules.errors import UserError
from datamodules.files import FileHashes, Hashed, hash_file
from datamodules.images.conditions import ConditionImages
from datamodules.images.dataset import PairDataset, leave_signals_to_the_trainer
from datamodules.images.framing import View
from datamodules.images.sample import Picture, Sample
from datamodules.images.sample_set import SampleSet, Usable
from datamodules.images.transforms import SIDE_MULTIPLE, image_facts
from datamodules.shards.cache import Cache
from datamodules.shards.tar import sample_id

log = logging.getLogger("retouch")


@dataclass
class EncodeRequest:
    """One sample: encoded alone, so that it does not depend on others in a batch.

    Attributes:
        raw: the view as a batch of one, with the sample's first caption.
        id: its name in the cache, derived from its content.
        images: what each condition image is known by: its sha256, and what is seen of it.
        captions: all of the sample's.
        view: its number among the views of the sample.
    """

    raw: RawBatch
    id: str
    images: list[str]
    captions: tuple[str, ...]
    view: int


def roles(sample: Sample) -> list[tuple[str, Picture]]:
    """The sample's files, each with its role: target, control or mask."""
    files: list[tuple[str, Picture]] = [("target", sample.target), *(("control", path) for path in sample.controls)]
    return [*files, ("mask", sample.mask)] if sample.mask else files


# Of a picture: its signature (4), its checksum, its width and height, and whether it has several frames.
REMEMBERED = 8


class Content(NamedTuple):
    """What is remembered of a sample's files.

    Attributes:
        checksums: (role, sha256) of each.
        usable: the sample with the sizes of its pictures.
    """

    checksums: list[tuple[str, str]]
    usable: Usable

    @classmethod
    def of(cls, sample: Sample, hashes: FileHashes) -> "Content | None":
        """None if a file is new, has changed, or is too small a picture."""
        files = [(role, hashes.known(path)) for role, path in roles(sample)]
        known = [(role, hashed) for role, hashed in files if hashed is not None and len(hashed) == REMEMBERED]
        if len(known) < len(files):
            return None
        facts = [hashed[5:8] for role, hashed in known if role != "mask"]
        if any(min(width, height) < SIDE_MULTIPLE for width, height, _ in facts):  # it cannot be used
            return None
        usable = Usable(sample, [(width, height) for width, height, _ in facts], any(frames for *_, frames in facts))
        return cls([(role, hashed[4]) for role, hashed in known], usable)

    def id(self, view: View) -> str:
        """The name in a cache of a view of the sample."""
        return sample_id(view.sample.prompts, self.checksums, view.windows)

    def images(self, view: View) -> list[str]:
        """What each condition image is known by."""
        controls = [checksum for role, checksum in self.checksums if role == "control"]
        return [json.dumps(one) for one in zip(controls, view.windows[1:], strict=True)]


def views_by_id(
    sample_set: SampleSet, samples: Iterable[Sample], hashes: FileHashes
) -> Iterator[tuple[Sample, Usable | None, dict[str, View]]]:
    """The samples, each with its views by their names in a cache; without them where a file is new or has changed."""
    for sample in samples:
        content = Content.of(sample, hashes)
        if content is None:
            yield sample, None, {}
        else:
            yield sample, content.usable, {content.id(view): view for view in sample_set.views(content.usable)}


def is_complete(sample_set: SampleSet, cache: Cache) -> bool:
    """Whether a cache has all that is to be seen of all samples."""
    ids = cache.sample_ids()
    found = views_by_id(sample_set, sample_set.find(), cache.hashes())
    return all(views and views.keys() <= ids for *_, views in found)


class EncodingDataModule(PromptData):
    """The samples that are missing from a cache, one per batch, divided among the processes.

    Args:
        sample_set: the samples, configured for the model that encodes them.
        num_workers: processes that decode images.
        cache: where they will be written.
    """

    def __init__(self, sample_set: SampleSet, num_workers: int, cache: Cache) -> None:
        super().__init__()
        self.sample_set = sample_set
        self.num_workers = num_workers
        self.cache = cache
        self.prepare_data_per_node = False
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.requests = _Requests([], cache.hashes(), sample_set.condition_images)

    def prepare_data(self) -> None:
        self.cache.recover()

    def setup(self, stage: str) -> None:
        # By position in the whole data set: a build that is resumed gives each sample to the same process, in order.
        mine = self.sample_set.find()[self.run.global_rank :: self.run.world_size]
        hashes, ids = self._hash(mine), self.cache.sample_ids()
        new: dict[str, tuple[int, View]] = {}
        unread: list[Sample] = []
        for sample, _, views in views_by_id(self.sample_set, mine, hashes):
            if not views:  # a file could not be read: `check` says why
                unread.append(sample)
            numbered = enumerate(views.items())
            new |= {id: (number, view) for number, (id, view) in numbered if id not in ids and id not in new}
        to_check = {view.sample.key: view.sample for _, view in new.values()}
        usable = {one.sample.key for one in self.sample_set.check([*to_check.values(), *unread])}
        items = [(view, id, number) for id, (number, view) in new.items() if view.sample.key in usable]
        self.requests = _Requests(items, hashes, self.sample_set.condition_images)

    def _hash(self, samples: Iterable[Sample]) -> FileHashes:
        """Compute the checksums of files that are new or have changed."""
        hashes = self.cache.hashes()
        paths = dict.fromkeys(path for sample in samples for _, path in roles(sample) if hashes.get(path) is None)
        if paths:
            with ThreadPoolExecutor() as pool:
                hashed = (one for one in pool.map(_hash_if_readable, paths) if one is not None)
                self.cache.remember(self.run.global_rank, hashed)
        return self.cache.hashes()

    def all_prompts(self) -> list[PromptRequest]:
        if self.sample_set.condition_images.text_sees_them or not self.requests.items:
            return []
        captions = [prompt for view, *_ in self.requests.items for prompt in view.sample.prompts]
        return [(prompt, ()) for prompt in dict.fromkeys([*captions, ""])]

    def predict_dataloader(self) -> DataLoader[EncodeRequest]:
        return DataLoader(
            dataset=self.requests,
            batch_size=1,
            collate_fn=_alone,
            num_workers=min(self.num_workers, len(self.requests)),
            worker_init_fn=leave_signals_to_the_trainer,
        )


def _hash_if_readable(path: Picture) -> Hashed | None:
    try:
        return (*hash_file(path), *image_facts(path))
    except (OSError, UserError):
        return None


def _alone(items: list[EncodeRequest]) -> EncodeRequest:
    return items[0]


class _Requests(Dataset[EncodeRequest]):
    def __init__(
        self, items: list[tuple[View, str, int]], hashes: FileHashes, condition_images: ConditionImages
    ) -> None:
        self.items = items
        self.hashes = hashes
        self.pixels = PairDataset([view for view, *_ in items], condition_images, seed=None)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> EncodeRequest:
        view, id, number = self.items[index]
        raw = self.pixels[(index, 0)]
        content = Content.of(view.sample, self.hashes)
        if content is None or content.id(view) != id:  # else the new pixels would be cached under the old ones' id
            raise UserError(f"{view.sample.target} or a file of its pair changed while it was encoded: start again")
        return EncodeRequest(raw, id, content.images(view), view.sample.prompts, number)
