"""Parts that several tiny pipelines share."""

import string

import torch
from diffusers import AutoencoderKLQwenImage
from transformers import Qwen2Tokenizer

# Qwen3's template for one turn; without thinking, it would answer at once.
QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
CHARACTERS = string.ascii_letters + string.digits + ".,;:!?'\"()-+/&%#"
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Sizes of the language models.
LANGUAGE_MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
# Sizes that most transformers have.
TRANSFORMER = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def build_tokenizer(special: list[str], template: str | None = None, pad: str | None = None) -> Qwen2Tokenizer:
    """Return a tokenizer with a token for each character, and for each text of `special`."""
    more = {} if pad is None else {"pad_token": pad}
    vocabulary = {piece: index for index, piece in enumerate([*CHARACTERS, "Ġ", "Ċ"])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=special, chat_template=template, **more)


def qwen_vl_settings(tokenizer: Qwen2Tokenizer) -> dict:
    """Return the settings of a vision-language model with this tokenizer: of its text and of its tokens."""
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    end, start_image, end_image, image, video = tokenizer.convert_tokens_to_ids(["<|endoftext|>", *VISION])
    return {
        "text_config": {
            **LANGUAGE_MODEL,
            "vocab_size": len(tokenizer),
            "num_key_value_heads": 1,
            "rope_parameters": {"type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
            "bos_token_id": end,
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": end,
        },
        "vision_config": vision,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start_image,
        "vision_end_token_id": end_image,
    }


def build_qwen_vae() -> AutoencoderKLQwenImage:
    """Build a small autoencoder of Qwen-Image's class."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.7, 0.3, 0.1, -0.2],
        latents_std=[2.8, 1.4, 0.7, 1.2],
    )


def spread(model: torch.nn.Module, std: float) -> torch.nn.Module:
    """Return a model with weights as large as trained ones: the first ones hardly tell one input from another."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std) if parameter.ndim > 1 else None
    return model
