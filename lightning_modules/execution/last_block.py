"""A transformer's last block, for the tokens of the target alone.

The pipelines cut away what it gives for text and control tokens: there these are needed as keys and values only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.execution.autocast import compute_dtype

Rotation = tuple[Tensor, Tensor]


def keeping(owner: Any, attribute: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs later with an attribute as it is now, whatever it is then."""
    value = getattr(owner, attribute)

    def later(*args: Any) -> Any:
        present = getattr(owner, attribute)
        setattr(owner, attribute, value)
        try:
            return run(*args)
        finally:
            setattr(owner, attribute, present)

    return later


class LastBlock:
    """Stands for a block's forward.

    Args:
        block: with its own forward.
        compute: the forward for the target; arguments as the block's, and target and control tokens apart.
        unread: the block's layers that `compute` does without.
    """

    def __init__(
        self, block: nn.Module, compute: Callable[..., tuple[Tensor, Tensor]], unread: tuple[str, ...] = ()
    ) -> None:
        self.whole = block.forward
        self.block = block
        self.compute = compute
        self.unread = unread
        self.target_tokens: int | None = None

    def __call__(self, hidden_states: Tensor, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = self.target_tokens
        if count is None:
            return self.whole(hidden_states, encoder_hidden_states, *args, **kwargs)
        target, control = hidden_states[:, :count], hidden_states[:, count:]
        return self.compute(self.block, target, control, encoder_hidden_states, *args, **kwargs)


@contextmanager
def target_alone(block: nn.Module, tokens: int) -> Iterator[None]:
    """Inside, the block computes so many tokens, the first of the images', if it can."""
    last = block.forward
    if not isinstance(last, LastBlock):
        yield
        return
    last.target_tokens = tokens
    try:
        yield
    finally:
        last.target_tokens = None


def unread_parameters(transformer: nn.Module) -> list[str]:
    """The names of those that a last block does without: they may train and get no gradient, and DDP would wait."""
    return [
        f"{at}.{name}"
        for at, block in transformer.named_modules()
        if isinstance(last := block.forward, LastBlock)
        for name, _ in block.named_parameters()
        if name.startswith(tuple(f"{layer}." for layer in last.unread))
    ]


def flux_last_block(
    block: Any,
    target: Tensor,
    control: Tensor,
    text: Tensor,
    temb: Tensor,
    image_rotary_emb: Rotation,
    joint_attention_kwargs: None = None,
) -> tuple[Tensor, Tensor]:
    """diffusers' FluxSingleTransformerBlock: (B, T, D), (B, C, D), (B, L, D) -> the text as it is, target (B, T, D)."""
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


# The text's way out of the block.
QWEN_UNREAD = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")


def qwen_last_block(
    block: Any,
    target: Tensor,
    control: Tensor,
    text: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: Rotation,
    joint_attention_kwargs: None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """diffusers' QwenImageTransformerBlock: (B, T, D), (B, C, D), (B, L, D) -> the text as it is, target (B, T, D)."""
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
