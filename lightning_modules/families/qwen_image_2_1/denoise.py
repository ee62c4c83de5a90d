"""Qwen-Image-2.1's velocity: one sequence of text and images, whose layout is computed on the CPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from datamodules.batch import copy_to

# Latents in place of each image token of the text encoder: 2x2.
PER_SLOT = 4


@dataclass(eq=False)
class TargetTokens:
    """Stand-in for the mask (S,) of the target's tokens, whose others the stock forward would count on the GPU."""

    before: int
    mask: Tensor

    def __invert__(self) -> Self:
        return self

    def sum(self) -> int:
        return self.before

    def view(self, *shape: int) -> Tensor:
        return self.mask.view(*shape)


@dataclass(eq=False)
class JointSequence:
    """Layout of a batch's sequence: a stand-in for the mask from which the stock forward derives it, on the GPU.

    Attributes:
        source: (S,) each token's index among the text encoder's tokens and one for four of the target's latents.
        places: (N,) the places of the images' tokens.
        positions: (3, S) on the axes of the rotary embedding.
        images: (S,) each token's image, -1 for text, on the CPU.
        target: the target's tokens.
    """

    source: Tensor
    places: Tensor
    positions: Tensor
    images: np.ndarray
    target: TargetTokens

    def __getitem__(self, sample: int) -> Self:
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.where:  # repeats of each token
            return args[0]
        if function is torch.repeat_interleave:  # of this mask
            return args[0].places
        if function is Tensor.repeat_interleave:  # of the text's tokens
            return args[0].index_select(1, args[1].source)
        return NotImplemented

    def rotary_embedding(self, rope: Any) -> Tensor:
        """Return the stock module's frequencies (S, D/2), complex, without its tables of all positions."""
        with self.positions.device:
            angles = zip(self.positions, rope.axes_dim, strict=True)
            return torch.cat([rope.rope_params(axis, dim, rope.theta) for axis, dim in angles], dim=-1)

    @contextmanager
    def known_to(self, transformer: Any) -> Iterator[None]:
        """Temporarily make the stock forward use this layout."""
        embedding = self.rotary_embedding(transformer.pos_embed)
        transformer.pos_embed.forward = lambda *args, **kwargs: embedding
        transformer.build_token_metadata = lambda *args: (self.images, self.target)
        try:
            yield
        finally:
            del transformer.pos_embed.forward, transformer.build_token_metadata


def joint_sequence(slots: np.ndarray, sizes: Sequence[Sequence[int]], device: torch.device) -> JointSequence:
    """Lay out text and images.

    Args:
        slots: (L,) bool: True for the text encoder's image tokens.
        sizes: height and width of each image's latents; the target is the last.
    """
    counts = [height * width for height, width in sizes]
    slots = np.concatenate([slots, np.ones(counts[-1] // PER_SLOT, dtype=bool)])
    source = np.repeat(np.arange(len(slots)), np.where(slots, PER_SLOT, 1))
    is_image = slots[source]
    images = np.full(len(source), -1)
    images[is_image] = np.repeat(np.arange(len(sizes)), counts)
    # Text advances all axes by one; an image advances them by its longer side, and is centred on rows and columns.
    text_before = np.cumsum(~is_image) - ~is_image
    images_before = np.maximum.accumulate(images) + ~is_image
    positions = np.tile(text_before + np.cumsum([0, *map(max, sizes)])[images_before], (3, 1))
    centred = [np.indices(size) - [[[side - side // 2]] for side in size] for size in sizes]
    positions[1:, is_image] = np.concatenate([grid.reshape(2, -1) for grid in centred], axis=1)
    before = len(source) - counts[-1]

    def on_device(values: np.ndarray) -> Tensor:
        return copy_to(torch.from_numpy(values), device)

    target = TargetTokens(before, on_device(np.arange(len(source)) >= before))
    return JointSequence(on_device(source), on_device(np.flatnonzero(is_image)), on_device(positions), images, target)


def latent_tokens(latents: Sequence[Tensor]) -> Tensor:
    """Latents, each (B, C, h, w) -> (B, sum of h*w, C)."""
    return torch.cat([one.flatten(2).transpose(1, 2) for one in latents], dim=1)


def target_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, N, C), the target's tokens last -> (B, C, height, width)."""
    return tokens[:, -height * width :].transpose(1, 2).unflatten(2, (height, width))


def latent_shapes(latents: Sequence[Tensor]) -> list[list[tuple[int, ...]]]:
    """Return (frames, height, width) of each image, which all samples share."""
    return [[(1, *one.shape[-2:]) for one in latents]]


def qwen21_velocity(
    transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
) -> Tensor:
    """Predict the velocity (B, C, h, w) of (B, C, h, w) at t (B,).

    Args:
        prompt: `image_pad_mask` on the CPU, of the first sample; without it, as in estimates, images precede the text.
    """
    latents, embeds = [*controls, x_t], prompt["prompt_embeds"]
    if "image_pad_mask" in prompt:
        slots = prompt["image_pad_mask"][0].numpy()
    else:
        slots = np.arange(embeds.shape[1]) < sum(one.shape[2] * one.shape[3] for one in controls) // PER_SLOT
    sequence = joint_sequence(slots, [one.shape[-2:] for one in latents], x_t.device)
    with sequence.known_to(transformer):
        predicted = transformer(
            hidden_states=latent_tokens(latents),
            encoder_hidden_states=embeds,
            timestep=t,
            img_shapes=latent_shapes(latents),
            img_mask=sequence,
            return_dict=False,
        )[0]
    return target_latents(predicted, *x_t.shape[-2:])
