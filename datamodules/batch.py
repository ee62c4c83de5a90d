"""Batches, the interface between the data and the model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from foundation.errors import UserError

# A prompt and the condition images that its text encoder sees with it.
PromptRequest = tuple[str, tuple[Path, ...]]
# Tensors with this ending are read on the CPU and never moved to a device.
ON_HOST = "_mask"


class Batch:
    """The common base of raw and encoded batches."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with `function` applied to its tensors, except those that stay on the CPU."""
        changes: dict[str, Any] = {}
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if isinstance(value, Tensor):
                changes[one.name] = function(value)
            elif isinstance(value, dict):
                changes[one.name] = {k: v if k.endswith(ON_HOST) else function(v) for k, v in value.items()}
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                changes[one.name] = [function(tensor) for tensor in value]
        return replace(self, **changes)  # type: ignore[type-var]

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device; the copy is asynchronous."""
        return self.map(lambda tensor: copy_to(tensor, device))

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors except those that stay on the CPU."""
        found: list[Tensor] = []
        self.map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return iter(found)


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; the copy is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass
class RawBatch(Batch):
    """Samples of one size, as pixels in [-1, 1].

    Attributes:
        keys: the samples' names, for messages.
        draws: each sample's index in the order in which the run draws samples. All randomness of a sample (noise,
            timestep, caption dropout) is a function of the seed and this index only.
        prompts: one instruction per sample.
        target: (B, C, H, W), C 3 or with alpha 4; None in prediction.
        controls: the condition images, each (B, C, h, w) at a size of its own.
        mask: (B, 1, H, W) in [0, 1], the weight of each pixel in the loss.
        prompt_images: for each sample the condition images as its text encoder sees them, each (C, h, w) in 8 bits;
            empty for models whose text encoder sees no images. They stay on the CPU.
        weights: (B,), of each sample in the loss; None if all are 1.
        preserve_prompts: one of `Objective.preserve_prompts` per sample; empty if there are none.
        rejected: (B, C, H, W), the image that is preferred less than the target; None if there is none.
        dropped: whether a sample's caption is dropped, so that its prompt is empty; [] if none is.
        has_first: whether the first control is the samples' first condition image, which a target edits.
    """

    keys: list[str]
    draws: list[int]
    prompts: list[str]
    target: Tensor | None
    controls: list[Tensor]
    mask: Tensor | None = None
    prompt_images: list[list[Tensor]] = field(default_factory=list)
    weights: Tensor | None = None
    preserve_prompts: list[str] = field(default_factory=list)
    rejected: Tensor | None = None
    dropped: list[bool] = field(default_factory=list)
    has_first: bool = True

    def __post_init__(self) -> None:
        self.prompt_images = self.prompt_images or [[] for _ in self.prompts]

    @property
    def images(self) -> list[Tensor]:
        return [image for image in (*self.controls, self.target) if image is not None]


@dataclass
class LatentBatch(Batch):
    """Samples encoded by the frozen encoders, complete for a training step.

    Latents are the autoencoder's outputs, before shift and scale.

    Attributes:
        keys, draws, mask, weights, prompts, dropped, has_first: as in `RawBatch`; prompts are empty if only the shards
            of a cache are known.
        target_mean, target_std: (B, C, H, W), the distribution of the target's latent.
        rejected_mean, rejected_std: the same for the rejected image; None if there is none.
        controls: the modes of the condition images' latents, each (B, C, h, w).
        prompt: the family's text conditioning by diffusers' argument names, each (B, ...), padded with zeros to the
            longest of the batch; masks are padded as well, and stay on the CPU.
        empty_prompt: the same for the empty prompt, if the objective compares with it; in prediction, for the negative
            prompt. One row may serve all samples.
        preserve_prompt: the same for one of `Objective.preserve_prompts` for each sample; empty if there are none.
    """

    keys: list[str]
    draws: list[int]
    target_mean: Tensor | None
    target_std: Tensor | None
    controls: list[Tensor]
    prompt: dict[str, Tensor]
    empty_prompt: dict[str, Tensor]
    mask: Tensor | None = None
    prompts: list[str] = field(default_factory=list)
    weights: Tensor | None = None
    preserve_prompt: dict[str, Tensor] = field(default_factory=dict)
    rejected_mean: Tensor | None = None
    rejected_std: Tensor | None = None
    dropped: list[bool] = field(default_factory=list)
    has_first: bool = True

    @property
    def known_target(self) -> Tensor:
        """The mean of the target's latent, which only batches of a prediction lack."""
        assert self.target_mean is not None
        return self.target_mean


@dataclass(frozen=True)
class Geometry:
    """Sizes of images, latents and a transformer's tokens.

    Attributes:
        patch: side of a token's patch of the latent.
        packed: whether the transformer takes tokens; else it takes latents.
        text: name of the prompt tensor (B, L, ...) with one row for each text token.
        equal_text: whether the samples of a batch need text of one length, since padding would change the result.
        side_multiple: divisor of width and height of an image whose size can be chosen.
        result_multiple: divisor of width and height that predict.py may be given.
        resolution: side of a square image.
    """

    patch: int = 2
    packed: bool = True
    text: str = "prompt_embeds"
    equal_text: bool = False
    side_multiple: int = 16
    result_multiple: int = 16
    resolution: int = 1024

    def channels(self, config: Mapping[str, Any]) -> int:
        """Return the channels of a latent, from the transformer's config."""
        return config["in_channels"] // (self.patch**2 if self.packed else 1)

    def image_tokens(self, size: Sequence[int]) -> int:
        """Count the tokens of a latent (..., height, width)."""
        return size[-2] * size[-1] // self.patch**2

    def target_tokens(self, batch: LatentBatch) -> int:
        """Count the target's tokens of one sample of a batch."""
        return self.image_tokens(batch.known_target.shape)

    def token_count(self, batch: LatentBatch) -> int:
        controls = sum(self.image_tokens(control.shape) for control in batch.controls)
        return (batch.prompt[self.text].shape[1] + self.target_tokens(batch) + controls) * len(batch.keys)


def stack_padded(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack tensors by name: (L_1, ...), (L_2, ...), ... -> (B, longest, ...), padded with zeros.

    Raises:
        UserError: sequences without a mask differ in length: the model would take the padding for text.
    """

    def stack(name: str) -> Tensor:
        tensors = [sample[name] for sample in samples]
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) == 1:
            return torch.stack(tensors)
        if not name.endswith(ON_HOST) and f"{name}{ON_HOST}" not in samples[0]:
            raise UserError(
                f"a batch has {name} of {sorted(lengths)} tokens, and this model masks none: use data.batch_size=1"
            )
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    return {name: stack(name) for name in samples[0]}
