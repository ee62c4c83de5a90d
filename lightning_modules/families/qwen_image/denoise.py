"""Qwen-Image's velocity as pure functions: its tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_modules.families.patches import padding_mask, predict_target


def image_shapes(latents: Sequence[Sequence[int]], samples: int) -> list[list[tuple[int, int, int]]]:
    """Height 2H and width 2W of each image's latent -> (frames, H, W) of each image, for every sample."""
    return [[(1, height // 2, width // 2) for height, width in latents]] * samples


def qwen_velocity(
    transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
) -> Tensor:
    """Predict the velocity (B, C, h, w) of (B, C, h, w) at t (B,)."""
    images = [x_t, *controls]
    return predict_target(
        transformer,
        images,
        timestep=t,
        encoder_hidden_states=prompt["prompt_embeds"],
        encoder_hidden_states_mask=padding_mask(prompt, x_t.device),
        img_shapes=image_shapes([image.shape[-2:] for image in images], len(x_t)),
    )
