"""Tiny vision-language models of the real classes, random and in float32, in folders as from the hub."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.support.tiny_pipelines import CHARACTERS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>"]
# As Qwen's, without videos and tools.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
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
    """Write one whose answers differ from picture to picture."""
    model_class, config_class, vision, text, processor_class, video_class = CLASSES[name]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate([*CHARACTERS, "Ġ", "Ċ"])}, merges=[], extra_special_tokens=SPECIAL
    )
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL), strict=True))
    config = config_class(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            **text,
        },
        vision_config={**VISION, **vision},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        model = model_class(config)
        for parameter in model.parameters():  # transformers begins with numbers that let no picture be seen
            torch.nn.init.normal_(parameter, std=0.5) if parameter.ndim > 1 else None
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.8, top_k=20)  # as the real ones
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessor(patch_size=vision.get("patch_size", 14), min_pixels=32 * 32)
    processor_class(images, tokenizer, video_class(), chat_template=TEMPLATE).save_pretrained(folder)
