"""FLUX.2's velocity as pure functions: its tokens and their positions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_modules.families.patches import predict_target, token_grid

# Distance on the axis of images, from the target to the first reference and from each to the next.
BETWEEN_IMAGES = 10


def flux2_text_ids(tokens: int, device: torch.device) -> Tensor:
    """Return (L, 4): three zeros and the index of the token."""
    return torch.nn.functional.pad(torch.arange(tokens, device=device)[:, None], (3, 0))


def flux2_image_ids(images: Sequence[Tensor], first: int = 0) -> Tensor:
    """Latents, each (B, C, 2H, 2W) -> (sum of H*W, 4): index of the image, row, column, zero.

    Args:
        first: index of the first image: 0 the target, 1, 2, ... its references.
    """
    ids = []
    for index, image in enumerate(images, first):
        rows, columns = token_grid(image)
        axes = torch.full_like(rows, BETWEEN_IMAGES * index), rows, columns, torch.zeros_like(rows)
        ids.append(torch.stack(axes, dim=-1).reshape(-1, 4))
    return torch.cat(ids)


def empirical_mu(config: Mapping[str, Any], tokens: int, num_inference_steps: int) -> float:
    """Return the shift of timesteps in the stock pipelines; arguments as for `SamplingRules.mu`."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    return compute_empirical_mu(tokens, num_inference_steps)


def flux2_velocity(
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
    images, embeds = [x_t, *controls], prompt["prompt_embeds"]
    return predict_target(
        transformer,
        images,
        timestep=t,
        guidance=torch.full_like(t, guidance_scale) if transformer.config.guidance_embeds else None,
        encoder_hidden_states=embeds,
        txt_ids=flux2_text_ids(embeds.shape[1], embeds.device),
        img_ids=flux2_image_ids(images),
    )
