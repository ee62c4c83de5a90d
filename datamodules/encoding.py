"""The samples that are missing from a cache, to be encoded by trainer.predict."""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch.utils.data import DataLoader, Dataset

from datamodules.base import PromptData
from datamodules.batch import PromptRequest, RawBatch
from datamodules.errors import UserError
from datamodules.files import FileHashes, Hashed, hash_file
from datamodules.images.conditions import ConditionImages
from datamodules.images.dataset import PairDataset, leave_signals_to_the_trainer
from datamodules.images.sample import Picture, Sample
from datamodules.images.sample_set import SampleSet
from datamodules.shards.cache import Cache
from datamodules.shards.tar import sample_id

log = logging.getLogger("retouch")


@dataclass
class EncodeRequest:
    """One sample: encoded alone, so that it does not depend on others in a batch.

    Attributes:
        raw: the sample as a batch of one.
        id: its name in the cache, derived from its content.
        images: the sha256 of each condition image.
        resized: whether a side was rounded down.
    """

    raw: RawBatch
    id: str
    images: list[str]
    resized: bool


def roles(sample: Sample) -> list[tuple[str, Picture]]:
    """The sample's files, each with its role: target, control or mask."""
    files: list[tuple[str, Picture]] = [("target", sample.target), *(("control", path) for path in sample.controls)]
    return [*files, ("mask", sample.mask)] if sample.mask else files


def content_id(sample: Sample, hashes: FileHashes) -> str | None:
    """The sample's name in a cache; None if the checksum of a file is unknown."""
    files = [(role, hashes.get(path)) for role, path in roles(sample)]
    known = [(role, checksum) for role, checksum in files if checksum is not None]
    return sample_id(sample.prompts[0], known) if len(known) == len(files) else None


def missing_from_cache(samples: Iterable[Sample], cache: Cache) -> list[Sample]:
    """The samples that the cache lacks, and those with files that are new or changed."""
    ids, hashes = cache.sample_ids(), cache.hashes()
    return [sample for sample in samples if content_id(sample, hashes) not in ids]


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
        samples = self.sample_set.find()
        absent = {sample.key for sample in missing_from_cache(samples, self.cache)}
        # By position in the whole data set: a build that is resumed gives each sample to the same process, in order.
        mine = samples[self.run.global_rank :: self.run.world_size]
        mine = [sample for sample in mine if sample.key in absent]
        hashes, ids = self._hash(mine), self.cache.sample_ids()
        new: dict[str, Sample] = {}
        unread: list[Sample] = []
        for sample in mine:
            id = content_id(sample, hashes)
            if id is None:  # a file could not be read: `check` says why
                unread.append(sample)
            elif id not in ids:
                new.setdefault(id, sample)
        usable = {one.sample.key: one.rounded for one in self.sample_set.check([*new.values(), *unread])}
        self.requests = _Requests(
            [
                (sample, id, [hashes.get(path) or "" for path in sample.controls], usable[sample.key])
                for id, sample in new.items()
                if sample.key in usable
            ],
            hashes,
            self.sample_set.condition_images,
        )

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
        return [
            (prompt, ()) for prompt in dict.fromkeys([*(sample.prompts[0] for sample, *_ in self.requests.items), ""])
        ]

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
        return hash_file(path)
    except OSError:
        return None


def _alone(items: list[EncodeRequest]) -> EncodeRequest:
    return items[0]


class _Requests(Dataset[EncodeRequest]):
    def __init__(
        self, items: list[tuple[Sample, str, list[str], bool]], hashes: FileHashes, condition_images: ConditionImages
    ) -> None:
        self.items = items
        self.hashes = hashes
        self.pixels = PairDataset([sample for sample, *_ in items], condition_images)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> EncodeRequest:
        sample, id, images, resized = self.items[index]
        raw = self.pixels[(index, 0)]
        if content_id(sample, self.hashes) != id:  # else the new pixels would be cached under the old ones' id
            raise UserError(f"{sample.target} or a file of its pair changed while it was encoded: start again")
        return EncodeRequest(raw, id, images, resized)
