"""Z-Image's velocity, as pure functions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.execution.blocks import compute_dtype


def real_tokens(embeds: Tensor, mask: Tensor | None) -> list[Tensor]:
    """(B, L, D) and ones for tokens that count, (B, L), which are the first -> of each sample (its own L, D).

    Without a mask all tokens count. A mask is read: it should be on the host.
    """
    if mask is None:
        return list(embeds)
    return [one[:length] for one, length in zip(embeds, mask.sum(dim=1).tolist(), strict=True)]


def velocity(transformer: Any, x_t: Tensor, t: Tensor, prompt: Mapping[str, Tensor]) -> Tensor:
    """The transformer's prediction (B, C, h, w) of (B, C, h, w) at t (B,).

    The transformer counts time from noise to the picture, and predicts the velocity that way.
    """
    x_t = x_t.to(compute_dtype(x_t))  # as the pipeline: what modulates the layers takes its dtype
    predicted = transformer(
        list(x_t.unsqueeze(2)),
        1 - t,
        real_tokens(prompt["prompt_embeds"], prompt.get("prompt_embeds_mask")),
        return_dict=False,
    )[0]
    return -torch.stack(predicted).squeeze(2)
