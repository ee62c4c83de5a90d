"""Latents as a transformer's tokens, 2x2 patches, in training and in stock pipelines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.batch import copy_to


def pack(latents: Tensor) -> Tensor:
    """(B, C, 2H, 2W) -> (B, H*W, 4C), each token one 2x2 patch."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, H*W, 4C) -> (B, C, 2H, 2W), for latents of `height` = 2H and `width` = 2W."""
    batch, _, channels = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels // 4, height, width)


def token_grid(latents: Tensor, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """(B, C, 2H, 2W) -> the row and the column of each token, each (H, W)."""
    sides = (torch.arange(side // 2, device=latents.device, dtype=dtype) for side in latents.shape[-2:])
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return rows, columns


def padding_mask(prompt: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
    """Return the mask (B, L) of the prompts on a device; None if all tokens count: attention without it is faster."""
    mask = prompt.get("prompt_embeds_mask")
    return None if mask is None or len(mask) == 1 or mask.all() else copy_to(mask, device)


def predict_target(transformer: Any, images: Sequence[Tensor], **arguments: Any) -> Tensor:
    """Predict for the first of some latents, (B, C, h, w); the others are controls.

    Args:
        arguments: arguments of the transformer besides the images' tokens.
    """
    tokens = [pack(image) for image in images]
    predicted = transformer(hidden_states=torch.cat(tokens, dim=1), return_dict=False, **arguments)[0]
    return unpack(predicted[:, : tokens[0].shape[1]], *images[0].shape[-2:])


class LatentPipeline:
    """Mixin of diffusers pipelines: from latents to latents, whatever devices the components are on."""

    controls: list[Tensor]
    transformer: Any
    vae_scale_factor: int

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        """Sample images of `size` (width, height), as latents (B, C, h, w).

        Args:
            controls: normalized latents (B, C, ...), any number, each of its own size.
            arguments: arguments of the stock pipeline.
        """
        width, height = size
        self.controls = controls
        pipeline: Any = self
        made = pipeline(height=height, width=width, output_type="latent", **arguments).images
        return self.unpacked(made, height // self.vae_scale_factor, width // self.vae_scale_factor)

    def unpacked(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """Return the pipeline's result as latents (B, C, height, width)."""
        return unpack(tokens, height, width)

    def packed_controls(self) -> Tensor:
        """Return the controls' tokens (B, N, 4C)."""
        return torch.cat([pack(control) for control in self.controls], dim=1)

    @property
    def _execution_device(self) -> torch.device:
        # The stock pipeline returns the device of its first component; ours may be on several.
        return self.transformer.device
