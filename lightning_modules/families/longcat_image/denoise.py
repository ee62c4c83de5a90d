"""LongCat's velocity as pure functions: its tokens and their positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.families.patches import predict_target, token_grid

TEXT, TARGET, CONTROL = range(3)


def longcat_text_ids(length: int, device: torch.device) -> Tensor:
    """Return (L, 3): the modality, and each token's index twice."""
    indices = torch.arange(length, device=device, dtype=torch.float32)
    return torch.stack([torch.full_like(indices, TEXT), indices, indices], dim=-1)


def longcat_image_ids(latents: Tensor, modality: int, start: int) -> Tensor:
    """(B, C, 2H, 2W) -> (H*W, 3): the modality, row and column, which begin at the text's length."""
    rows, columns = token_grid(latents, torch.float32)
    return torch.stack([torch.full_like(rows, modality), rows + start, columns + start], dim=-1).reshape(-1, 3)


def longcat_velocity(
    transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
) -> Tensor:
    """Predict the velocity (B, C, h, w) of (B, C, h, w) at t (B,)."""
    embeds = prompt["prompt_embeds"]
    length = embeds.shape[1]
    ids = [longcat_image_ids(x_t, TARGET, length)]
    ids += [longcat_image_ids(control, CONTROL, length) for control in controls]
    return predict_target(
        transformer,
        [x_t, *controls],
        timestep=t,
        encoder_hidden_states=embeds,
        txt_ids=longcat_text_ids(length, embeds.device),
        img_ids=torch.cat(ids),
    )
