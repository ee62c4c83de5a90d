"""Latents as a transformer's tokens: 2x2 patches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.execution.blocks import target_tokens_only


def pack(latents: Tensor) -> Tensor:
    """(B, C, 2H, 2W) -> (B, H*W, 4C), each token one 2x2 patch."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, H*W, 4C) -> (B, C, 2H, 2W), where `height` = 2H and `width` = 2W are the latent's sides."""
    batch, _, channels = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels // 4, height, width)


def predict_target(
    transformer: Any, last_block: nn.Module, images: Sequence[Tensor], text_tokens: int = 0, **arguments: Any
) -> Tensor:
    """What the transformer gives for the first of some latents, (B, C, h, w): the others are controls.

    Args:
        last_block: the transformer's, which may compute the target's tokens alone.
        text_tokens: how many of text come before the images' in that block's `hidden_states`.
        arguments: of the transformer, beside the images' tokens.
    """
    tokens = [pack(image) for image in images]
    count = tokens[0].shape[1]
    with target_tokens_only(last_block, count, text_tokens):
        predicted = transformer(hidden_states=torch.cat(tokens, dim=1), return_dict=False, **arguments)[0]
    return unpack(predicted[:, :count], *images[0].shape[-2:])
