"""The samples that a cache lacks, to be encoded by trainer.predict."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter

from torch.utils.data import DataLoader, Dataset

from datamodules.base import PromptData
from datamodules.batch import PromptRequest, RawBatch
from datamodules.contents import Content, Entry, entries_of, roles
from datamodules.images.decoding import image_facts, verify_mask
from datamodules.images.recipe_images import source_of
from datamodules.images.sample_set import SampleSet
from datamodules.images.samples import ImageFile, Sample
from datamodules.images.windows import ConditionImages
from datamodules.pairs import PairDataset, leave_signals_to_the_trainer
from datamodules.shards.cache import Cache
from foundation.errors import UserError
from foundation.hashes import FileHashes, Hashed, hash_file


@dataclass
class EncodeRequest:
    """A sample, encoded alone so that it does not depend on the rest of a batch.

    Attributes:
        raw: the view as a batch of one, with the sample's first caption.
        id: its id in the cache, derived from its content.
        images: the identity of each condition image: its sha256 and its visible part.
        captions: all of the sample's.
        preserved: further prompts, which the cache lacks.
        view: its index among the views of the sample.
    """

    raw: RawBatch
    id: str
    images: list[str]
    captions: tuple[str, ...]
    preserved: tuple[str, ...]
    view: int


class EncodingDataModule(PromptData):
    """This process's share of the samples that a cache lacks, one per batch.

    Args:
        sample_set: the samples, configured for the model that encodes them.
        num_workers: processes that decode images.
        cache: the destination.
        preserve_prompts: prompts whose conditioning is encoded with each sample.
    """

    def __init__(
        self, sample_set: SampleSet, num_workers: int, cache: Cache, preserve_prompts: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.sample_set = sample_set
        self.num_workers = num_workers
        self.cache = cache
        self.prepare_data_per_node = not cache.on_disk
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.preserve_prompts = preserve_prompts
        self.requests = _Requests([], FileHashes([]), sample_set.condition_images)

    def prepare_data(self) -> None:
        self.cache.begin(self.run.is_global_zero)

    def setup(self, stage: str) -> None:
        self.cache.join()
        rank = self.run.global_rank
        mine = self.sample_set.find().samples[rank :: self.run.world_size]
        hashes = hash_files(self.cache, rank, mine)
        ids = self.cache.sample_ids(prompts=bool(self.preserve_prompts))
        lacking: list[Entry] = []
        to_check: list[Sample] = []
        for sample, _, entries in entries_of(self.sample_set, mine, hashes, self.preserve_prompts):
            lacking += (new := [entry for entry in entries if not entry.names <= ids])
            if new or not entries:  # without any, a file could not be read: `check` reports it
                to_check.append(sample)
        usable = {one.sample.key for one in self.sample_set.check(to_check)[0]}
        missing: list[Entry] = []
        for entry in lacking:
            if entry.view.sample.key in usable and not entry.names <= ids:
                preserved = {prompt: name for prompt, name in entry.preserved.items() if name not in ids}
                missing.append(entry._replace(preserved=preserved))
                ids |= entry.names
        self.requests = _Requests(missing, hashes, self.sample_set.condition_images)

    def all_prompts(self) -> list[PromptRequest]:
        if self.sample_set.condition_images.text_sees_them:
            return []
        items = self.requests.items
        wanted = [prompt for one in items for prompt in (*one.view.sample.prompts, *one.preserved, "")]
        return [(prompt, ()) for prompt in dict.fromkeys(wanted)]

    def predict_dataloader(self) -> DataLoader[EncodeRequest]:
        return DataLoader(
            dataset=self.requests,
            batch_size=1,
            collate_fn=itemgetter(0),
            num_workers=min(self.num_workers, len(self.requests)),
            worker_init_fn=leave_signals_to_the_trainer,
        )


def hash_files(cache: Cache, rank: int, samples: Sequence[Sample]) -> FileHashes:
    """Compute the checksums of the samples' files that are new or have changed, and return all known ones."""
    hashes = cache.file_hashes()
    paths = dict.fromkeys(source_of(path) for sample in samples for _, path in roles(sample))
    masks = {sample.mask for sample in samples}
    new = [path for path in paths if hashes.known(path) is None]
    if new:
        with ThreadPoolExecutor() as pool:
            found = pool.map(_hash_if_readable, new, (path in masks for path in new))
            cache.add_file_hashes(rank, (one for one in found if one is not None))
    return cache.file_hashes()


def _hash_if_readable(path: ImageFile, is_mask: bool) -> Hashed | None:
    """Return the facts to remember about a file: its signature, its checksum, and its `Facts`."""
    try:
        return (*hash_file(path), *image_facts(path), is_mask and verify_mask(path))
    except (OSError, UserError):
        return None


class _Requests(Dataset[EncodeRequest]):
    def __init__(self, items: Sequence[Entry], hashes: FileHashes, condition_images: ConditionImages) -> None:
        self.items = items
        self.hashes = hashes
        self.pixels = PairDataset([one.view for one in items], condition_images)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> EncodeRequest:
        view, id, number, preserved = self.items[index]
        raw = self.pixels[(index, 0)]
        content = Content.of(view.sample, self.hashes)
        if content is None or content.id(view) != id:  # else the new pixels would be cached under the old id
            raise UserError(f"{view.sample.target} or a file of its pair changed while it was encoded. Start again.")
        return EncodeRequest(raw, id, content.images(view), view.sample.prompts, tuple(preserved), number)
