"""FLUX's velocity as pure functions: its tokens and their positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.families.patches import predict_target, token_grid


def position_ids(latents: Tensor, image: int) -> Tensor:
    """(B, C, 2H, 2W) -> (H*W, 3): index of the image (0 the target, 1, 2, ... its controls), row, column."""
    rows, columns = token_grid(latents, torch.float32)
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).reshape(-1, 3)


def flux_velocity(
    transformer: Any,
    x_t: Tensor,
    t: Tensor,
    controls: list[Tensor],
    prompt: Mapping[str, Tensor],
    guidance_scale: float,
) -> Tensor:
    """Predict the velocity (B, C, h, w) of (B, C, h, w) at t (B,).

    Args:
        guidance_scale: embedded if the transformer is guidance-distilled.
    """
    images = [x_t, *controls]
    embeds = prompt["prompt_embeds"]
    return predict_target(
        transformer,
        images,
        timestep=t,
        guidance=torch.full_like(t, guidance_scale) if transformer.config.guidance_embeds else None,
        pooled_projections=prompt["pooled_prompt_embeds"],
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(embeds.shape[1], 3, device=embeds.device),
        img_ids=torch.cat([position_ids(image, k) for k, image in enumerate(images)]),
    )
