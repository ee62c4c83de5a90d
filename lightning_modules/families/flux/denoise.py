"""FLUX's velocity as pure functions: its tokens, their positions, and its last block."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_modules.blocks import compute_dtype
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


def flux_last_block(
    block: Any,
    target: Tensor,
    control: Tensor,
    text: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: None = None,
) -> tuple[Tensor, Tensor]:
    """Compute diffusers' FluxSingleTransformerBlock for the target's tokens only.

    (B, T, D), (B, C, D), (B, L, D) -> the unchanged text, target (B, T, D).
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.embeddings import apply_rotary_emb

    attn, chosen = block.attn, slice(text.shape[1], text.shape[1] + target.shape[1])
    normed, gate = block.norm(torch.cat([text, target, control], dim=1), emb=temb)
    normed = normed.to(compute_dtype(normed))
    normed_target = normed[:, chosen]
    query, key, value = (
        project(tokens).unflatten(-1, (-1, attn.head_dim))
        for project, tokens in ((attn.to_q, normed_target), (attn.to_k, normed), (attn.to_v, normed))
    )
    cos, sin = image_rotary_emb
    query = apply_rotary_emb(attn.norm_q(query), (cos[chosen], sin[chosen]), sequence_dim=1)
    key = apply_rotary_emb(attn.norm_k(key), image_rotary_emb, sequence_dim=1)
    backend = attn.processor._attention_backend
    attended = dispatch_attention_fn(query, key, value, backend=backend).flatten(2, 3).to(query.dtype)
    update = block.proj_out(torch.cat([attended, block.act_mlp(block.proj_mlp(normed_target))], dim=2))
    return text, target + gate.unsqueeze(1) * update
