"""FLUX.2's velocity as pure functions: its tokens, their positions, and its last block."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_modules.blocks import compute_dtype
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
        text_tokens=embeds.shape[1],
        timestep=t,
        guidance=torch.full_like(t, guidance_scale) if transformer.config.guidance_embeds else None,
        encoder_hidden_states=embeds,
        txt_ids=flux2_text_ids(embeds.shape[1], embeds.device),
        img_ids=flux2_image_ids(images),
    )


def flux2_last_block(
    block: Any,
    target: Tensor,
    control: Tensor,
    text: Tensor,
    temb_mod: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: None = None,
) -> Tensor:
    """Compute diffusers' Flux2SingleTransformerBlock for the target's tokens only.

    (B, T, D), (B, C, D), (B, L, D) -> the unchanged text and target (B, L+T, D). One layer computes queries, keys,
    values and the MLP's input of all tokens: only the rest is for the target alone.
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.embeddings import apply_rotary_emb

    attn, chosen = block.attn, slice(text.shape[1], text.shape[1] + target.shape[1])
    shift, scale, gate = (temb_mod[:, None] if temb_mod.ndim == 2 else temb_mod).chunk(3, dim=-1)
    normed = (1 + scale) * block.norm(torch.cat([text, target, control], dim=1)) + shift
    projected = attn.to_qkv_mlp_proj(normed.to(compute_dtype(normed)))
    *heads, mlp = projected.split([*[attn.inner_dim] * 3, attn.mlp_hidden_dim * attn.mlp_mult_factor], dim=-1)
    query, key, value = (tokens.unflatten(-1, (-1, attn.head_dim)) for tokens in heads)
    cos, sin = image_rotary_emb
    query = apply_rotary_emb(attn.norm_q(query[:, chosen]), (cos[chosen], sin[chosen]), sequence_dim=1)
    key = apply_rotary_emb(attn.norm_k(key), image_rotary_emb, sequence_dim=1)
    backend = attn.processor._attention_backend
    attended = dispatch_attention_fn(query, key, value, backend=backend).flatten(2, 3).to(query.dtype)
    update = attn.to_out(torch.cat([attended, attn.mlp_act_fn(mlp[:, chosen])], dim=-1))
    return torch.cat([text, target + gate * update], dim=1)
