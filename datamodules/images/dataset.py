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
from datamodules.images.framing import View
from datamodules.images.window import load_image, load_mask
from datamodules.sampler import drawn_caption, drawn_preserved


def pictures(raw: RawBatch) -> list[Tensor]:
    """The controls, then the target."""
    return [image for image in (*raw.controls, raw.target) if image is not None]


class PairDataset(Dataset[RawBatch]):
    """Views decoded to batches of one, by (index of the view, number of the draw).

    Args:
        seed: draws one of a sample's captions, and of preserve_prompts; None for the first caption and none of these.
        preserve_prompts: of which each sample gets one beside its own.
    """

    def __init__(
        self,
        views: Sequence[View],
        condition_images: ConditionImages,
        seed: int | None,
        preserve_prompts: Sequence[str] = (),
    ) -> None:
        self.views = views
        self.condition_images = condition_images
        self.seed = seed
        self.preserve_prompts = preserve_prompts if seed is not None else ()
        self.weighted = any(view.weight != 1 for view in views)

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, item: tuple[int, int]) -> RawBatch:
        index, draw = item
        view = self.views[index]
        sample, (window, *windows) = view.sample, view.windows
        controls, prompt_images = self.condition_images.load(sample.controls, windows)
        others = self.preserve_prompts
        preserved = [others[drawn_preserved(self.seed, draw, len(others))]] if others and self.seed is not None else []
        return RawBatch(
            keys=[sample.key],
            draws=[draw],
            prompts=[sample.prompts[drawn_caption(self.seed, draw, len(sample.prompts))]],
            target=load_image(sample.target, window)[None],
            controls=controls,
            mask=load_mask(sample.mask, window)[None] if sample.mask else None,
            rejected=load_image(sample.rejected, window)[None] if sample.rejected else None,
            weights=torch.tensor([view.weight]) if self.weighted else None,
            prompt_images=[prompt_images],
            preserve_prompts=preserved,
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
        rejected=join([sample.rejected for sample in samples]),
        weights=join([sample.weights for sample in samples]),
        prompt_images=[images for sample in samples for images in sample.prompt_images],
        preserve_prompts=[prompt for sample in samples for prompt in sample.preserve_prompts],
    )


def leave_signals_to_the_trainer(worker: int) -> None:
    """Make a data worker ignore the signals that reach every process of a job: only the trainer acts on them.

    A worker that died of one would end the run at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _unless_the_trainer_has_left


def _unless_the_trainer_has_left(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback when the trainer has stopped and closed the connection to this worker."""
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)
