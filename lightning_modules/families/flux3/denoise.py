"""FLUX.3's velocity as pure functions: its tokens and their positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_modules.families.flux2.denoise import flux2_text_ids
from lightning_modules.families.patches import pack, predict_target, token_grid

# Rows and columns are multiplied by this.
IMAGE_SCALE = 0.5


def flux3_image_ids(latents: Tensor, index: int) -> Tensor:
    """(B, C, 2H, 2W) -> (H*W, 4): zero, scaled row and column, and the index: 0 the target, -1, -2, ... references."""
    rows, columns = (IMAGE_SCALE * axis for axis in token_grid(latents, torch.float32))
    return torch.stack([torch.zeros_like(rows), rows, columns, torch.full_like(rows, index)], dim=-1).reshape(-1, 4)


def flux3_velocity(
    transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
) -> Tensor:
    """Predict the velocity (B, C, h, w) of (B, C, h, w) at t (B,); the references have blocks of their own."""
    embeds = prompt["prompt_embeds"]
    references: dict[str, Any] = {}
    if controls:
        ids = [flux3_image_ids(control, -index) for index, control in enumerate(controls, 1)]
        tokens = torch.cat([pack(control) for control in controls], dim=1)
        references = {"image_cond_hidden_states": tokens, "image_cond_ids": torch.cat(ids)}
    predicted = predict_target(
        transformer,
        [x_t],
        timestep=t,
        encoder_hidden_states=embeds,
        txt_ids=flux2_text_ids(embeds.shape[1], embeds.device),
        img_ids=flux3_image_ids(x_t, 0),
        **references,
    )
    return predicted if controls else predicted + unused_references(transformer)


def unused_references(transformer: Any) -> Tensor | float:
    """Return a zero that depends on the parameters for references, so that each has a gradient in every step.

    Else DDP would wait for them, and an optimizer would leave them out; FSDP has gathered none of them.
    """
    trained = [one for name, one in transformer.named_parameters() if "image_cond" in name and one.requires_grad]
    local = (one.to_local() if isinstance(one, DTensor) else one for one in trained)
    return sum((0.0 * one.sum() for one in local), 0.0)
