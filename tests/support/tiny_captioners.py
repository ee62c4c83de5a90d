"""Tiny vision-language models of the real classes, random and in float32, in folders as from the hub."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.support.tiny_parts import CHAT, VISION, build_tokenizer, qwen_vl_settings, spread

# Qwen's template, without videos and tools.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLASSES: dict[str, tuple[Any, ...]] = {
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        {"head_dim": 16},
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {"fullatt_block_indexes": [1], "window_size": 56},
        {},
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
    ),
}


def build_captioner(folder: Path, name: str) -> None:
    """Write a captioner whose answers differ from image to image."""
    model_class, config_class, vision, text, processor_class, video_class = CLASSES[name]
    tokenizer = build_tokenizer([*CHAT, *VISION])
    settings = qwen_vl_settings(tokenizer)
    text_config, vision_config = settings.pop("text_config") | text, settings.pop("vision_config") | vision
    config = config_class(text_config=text_config, vision_config=vision_config, **settings)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        model = spread(model_class(config), 0.5)
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.8, top_k=20)  # as the real ones
    end = text_config["eos_token_id"], text_config["pad_token_id"]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = list(end), end[1]
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessor(patch_size=vision.get("patch_size", 14), min_pixels=32 * 32)
    processor_class(images, tokenizer, video_class(), chat_template=TEMPLATE).save_pretrained(folder)
