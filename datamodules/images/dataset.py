"""Samples decoded to pixels, in data workers."""

import signal
import sys
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.batch import RawBatch
from datamodules.images.conditions import ConditionImages
from datamodules.images.sample import Sample
from datamodules.images.transforms import load_image, load_mask


def pictures(raw: RawBatch) -> list[Tensor]:
    """The controls, then the target."""
    return [image for image in (*raw.controls, raw.target) if image is not None]


class PairDataset(Dataset[RawBatch]):
    """Samples decoded to batches of one, by (index of the sample, number of the draw)."""

    def __init__(self, samples: Sequence[Sample], condition_images: ConditionImages) -> None:
        self.samples = samples
        self.condition_images = condition_images

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, item: tuple[int, int]) -> RawBatch:
        index, draw = item
        sample = self.samples[index]
        target = load_image(sample.target)
        size = (target.shape[2], target.shape[1])
        controls, prompt_images = self.condition_images.load(sample.controls)
        return RawBatch(
            keys=[sample.key],
            draws=[draw],
            prompts=[sample.prompts[0]],
            target=target[None],
            controls=controls,
            mask=load_mask(sample.mask, size)[None] if sample.mask else None,
            prompt_images=[prompt_images],
        )


def collate(samples: list[RawBatch]) -> RawBatch:
    """Joins batches whose samples have one size."""

    def join(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return RawBatch(
        keys=[key for sample in samples for key in sample.keys],
        draws=[draw for sample in samples for draw in sample.draws],
        prompts=[prompt for sample in samples for prompt in sample.prompts],
        target=join([sample.target for sample in samples]),
        controls=[torch.cat(images) for images in zip(*(sample.controls for sample in samples), strict=True)],
        mask=join([sample.mask for sample in samples]),
        prompt_images=[images for sample in samples for images in sample.prompt_images],
    )


def leave_signals_to_the_trainer(worker: int) -> None:
    """Make a data worker ignore Ctrl-C and SIGTERM, which reach every process of a job: only the trainer acts on them.

    A worker that died of one would end the run at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _unless_the_trainer_has_left


def _unless_the_trainer_has_left(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback when the trainer has stopped and closed the connection to this worker."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)
