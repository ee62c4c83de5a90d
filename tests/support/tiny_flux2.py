"""Tiny FLUX.2 pipelines of the real classes, random and in float32, in diffusers' folder layout."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.tiny_parts import CHAT, QWEN3_TEMPLATE, TRANSFORMER, build_tokenizer, spread

# As Mistral's.
DEV_TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}"
    "[/SYSTEM_PROMPT]{% else %}[INST]{{ message.content[0].text }}[/INST]{% endif %}{% endfor %}"
)
LANGUAGE_MODEL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def flux2_parts(guidance_embeds: bool) -> dict[str, Any]:
    """Return all parts but text encoder and tokenizer."""
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )
    # Far from the 0 and 1 that a model begins with, and different for each channel of a token.
    vae.bn.running_mean.copy_(torch.linspace(-2.0, 1.5, 16))
    vae.bn.running_var.copy_(torch.linspace(0.1, 3.0, 16))
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": vae,
        "transformer": Flux2Transformer2DModel(
            **TRANSFORMER,
            in_channels=16,
            num_single_layers=2,
            joint_attention_dim=48,
            timestep_guidance_channels=32,
            mlp_ratio=2.0,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        ),
    }


def build_flux2_klein(folder: Path) -> None:
    """Write a Flux2KleinPipeline, whose Qwen3 has the layers that are read and one more."""
    torch.manual_seed(6)
    tokenizer = build_tokenizer([*CHAT, "<think>", "</think>"], QWEN3_TEMPLATE, pad="<|endoftext|>")
    text_encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=28, **LANGUAGE_MODEL))
    parts = flux2_parts(guidance_embeds=False)
    text_encoder = spread(text_encoder, 0.3)
    Flux2KleinPipeline(**parts, text_encoder=text_encoder, tokenizer=tokenizer).save_pretrained(folder)


def build_flux2_dev(folder: Path) -> None:
    """Write a Flux2Pipeline; the system message, longer than the prompts of the tests, is one token."""
    torch.manual_seed(7)
    special = ["<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", SYSTEM_MESSAGE]
    special += ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>"]
    tokenizer = build_tokenizer(special, pad="<pad>")
    text_encoder = Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={
                "model_type": "mistral", "vocab_size": len(tokenizer), "num_hidden_layers": 31, **LANGUAGE_MODEL,
            },
            vision_config={
                "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "head_dim": 8, "image_size": 28,
            },
            image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        )
    )  # fmt: skip
    processor = PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=DEV_TEMPLATE)
    parts = flux2_parts(guidance_embeds=True)
    text_encoder = spread(text_encoder, 0.3)
    Flux2Pipeline(**parts, text_encoder=text_encoder, tokenizer=processor).save_pretrained(folder)
