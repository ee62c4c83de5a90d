"""Qwen-Image's velocity as pure functions: its tokens and its last block."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.blocks import compute_dtype
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


# The layers of the last block that compute the text's output, which nothing reads.
UNREAD = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")


def qwen_last_block(
    block: Any,
    target: Tensor,
    control: Tensor,
    text: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor],
    joint_attention_kwargs: None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute diffusers' QwenImageTransformerBlock for the target's tokens only.

    (B, T, D), (B, C, D), (B, L, D) -> the unchanged text, target (B, T, D).
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    attn, count = block.attn, target.shape[1]
    text_temb = temb.chunk(2)[0] if block.zero_cond_t else temb
    first, second = block.img_mod(temb).chunk(2, dim=-1)
    images, gate = block._modulate(block.img_norm1(torch.cat([target, control], dim=1)), first, modulate_index)
    words, _ = block._modulate(block.txt_norm1(text), block.txt_mod(text_temb).chunk(2, dim=-1)[0])

    images, words = images.to(compute_dtype(images)), words.to(compute_dtype(words))

    def heads(tokens: Tensor, norm: nn.Module, frequencies: Tensor) -> Tensor:
        tokens = norm(tokens.unflatten(-1, (attn.heads, -1)))
        return apply_rotary_emb_qwen(tokens, frequencies, use_real=False)

    of_images, of_text = image_rotary_emb
    query = heads(attn.to_q(images[:, :count]), attn.norm_q, of_images[:count])
    text_key = heads(attn.add_k_proj(words), attn.norm_added_k, of_text)
    key = torch.cat([text_key, heads(attn.to_k(images), attn.norm_k, of_images)], dim=1)
    value = torch.cat([attn.add_v_proj(words), attn.to_v(images)], dim=1).unflatten(-1, (attn.heads, -1))
    mask = encoder_hidden_states_mask
    if mask is not None:
        mask = nn.functional.pad(mask, (0, images.shape[1]), value=1).bool()[:, None, None]
    backend = attn.processor._attention_backend
    attended = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=backend).flatten(2, 3).to(query.dtype)
    gate, index = gate[:, :count] if gate.shape[1] > 1 else gate, None
    if modulate_index is not None:
        index = modulate_index[:, :count]
    target = target + gate * attn.to_out[0](attended)
    normed, gate = block._modulate(block.img_norm2(target), second, index)
    return text, target + gate * block.img_mlp(normed)
