"""Z-Image's velocity as pure functions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.blocks import compute_dtype


def real_tokens(embeds: Tensor, mask: Tensor | None) -> list[Tensor]:
    """(B, L, D) and a mask (B, L), ones for each sample's first tokens -> each sample's own (L, D).

    None: all tokens count. Reading the mask would wait for the GPU: it should be on the CPU.
    """
    if mask is None:
        return list(embeds)
    return [one[:length] for one, length in zip(embeds, mask.sum(dim=1).tolist(), strict=True)]


def z_image_velocity(transformer: Any, x_t: Tensor, t: Tensor, prompt: Mapping[str, Tensor]) -> Tensor:
    """Predict the velocity (B, C, h, w) of (B, C, h, w) at t (B,); the transformer's own time and velocity are negated.

    Its time runs from noise to the image.
    """
    x_t = x_t.to(compute_dtype(x_t))  # as the pipeline: modulations have its dtype
    predicted = transformer(
        list(x_t.unsqueeze(2)),
        1 - t,
        real_tokens(prompt["prompt_embeds"], prompt.get("prompt_embeds_mask")),
        return_dict=False,
    )[0]
    return -torch.stack(predicted).squeeze(2)
