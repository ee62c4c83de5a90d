"""A tiny Qwen-Image-2.1 pipeline of the real classes, random and in float32, in diffusers' folder layout."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.support.tiny_parts import CHAT, TRANSFORMER, VISION, build_tokenizer, qwen_vl_settings, spread

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content[0].text }}<|im_end|>\n{% endfor %}"
)
# The system message, of which each letter would be a token; it is dropped.
SYSTEM = "Comprehend and analyze the provided prompt."


def build_qwen_2_1(folder: Path) -> None:
    """Write a QwenImage21Pipeline, whose tokens are letters."""
    tokenizer = build_tokenizer([*CHAT, *VISION, SYSTEM], TEMPLATE, pad="<|endoftext|>")
    torch.manual_seed(8)
    settings = qwen_vl_settings(tokenizer)
    vision = settings.pop("vision_config") | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    text = settings.pop("text_config") | {"head_dim": 16}
    text_encoder = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **settings))
    size = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size)
    QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
        ),
        vae=AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=8,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[-0.7, 0.3, 0.1, -0.2, 0.5, -0.4, 0.2, 0.6],
            latents_std=[2.8, 1.4, 0.7, 1.2, 2.1, 0.9, 1.6, 1.1],
        ),
        text_encoder=spread(text_encoder, 0.1),
        processor=Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=TEMPLATE),
        transformer=spread(
            QwenImage21Transformer2DModel(
                **TRANSFORMER, in_channels=8, out_channels=8, context_in_dim=32, axes_dims_rope=(4, 6, 6)
            ),
            0.15,
        ),
    ).save_pretrained(folder)
