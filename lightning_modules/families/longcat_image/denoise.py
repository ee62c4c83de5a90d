"""LongCat's velocity: its tokens and their positions, as pure functions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.patches import predict_target

TEXT, TARGET, CONTROL = range(3)


def text_ids(length: int, device: torch.device) -> Tensor:
    """(L, 3): the modality, and each token's place twice."""
    places = torch.arange(length, device=device, dtype=torch.float32)
    return torch.stack([torch.full_like(places, TEXT), places, places], dim=-1)


def image_ids(latents: Tensor, modality: int, start: int) -> Tensor:
    """(B, C, 2H, 2W) -> (H*W, 3): the modality, row and column, which are counted on from the text's length."""
    height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
    sides = (torch.arange(side, device=latents.device, dtype=torch.float32) for side in (height, width))
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([torch.full_like(rows, modality), rows + start, columns + start], dim=-1).reshape(-1, 3)


def velocity(transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
    """The transformer's prediction (B, C, h, w) of (B, C, h, w) at t (B,)."""
    embeds = prompt["prompt_embeds"]
    length = embeds.shape[1]
    ids = [image_ids(x_t, TARGET, length), *(image_ids(control, CONTROL, length) for control in controls)]
    return predict_target(
        transformer,
        transformer.single_transformer_blocks[-1],
        [x_t, *controls],
        timestep=t,
        encoder_hidden_states=embeds,
        txt_ids=text_ids(length, embeds.device),
        img_ids=torch.cat(ids),
    )
