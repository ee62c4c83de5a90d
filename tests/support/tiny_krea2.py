"""A tiny Krea 2 pipeline of the real classes, random and in float32, in diffusers' folder layout."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from transformers import Qwen3VLConfig, Qwen3VLModel

from tests.support.tiny_parts import CHAT, VISION, build_qwen_vae, build_tokenizer, qwen_vl_settings, spread

# Most of the system message is one token, so that the prompt begins at the pipeline's 34th.
SYSTEM = "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the"
SYSTEM += " objec"
LAYERS = (1, 2, 4)


def build_krea2(folder: Path) -> None:
    """Write a Krea2Pipeline that reads three layers of four."""
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(8)
        tokenizer = build_tokenizer([*CHAT, *VISION, SYSTEM, "assistant"], pad="<|endoftext|>")
        settings = qwen_vl_settings(tokenizer)
        text = settings.pop("text_config") | {"num_hidden_layers": 5, "head_dim": 16}
        vision = settings.pop("vision_config") | {
            "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        }  # fmt: skip
        text_encoder = Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=vision, **settings))
        transformer = Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            timestep_embed_dim=32,
            text_hidden_dim=32,
            num_text_layers=len(LAYERS),
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        )
        # Zeros at first: modulation and norms would be those of any other block.
        for name, parameter in transformer.named_parameters():
            if parameter.ndim == 1 or "scale_shift_table" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        Krea2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
            vae=build_qwen_vae(),
            text_encoder=spread(text_encoder, 0.3),
            tokenizer=tokenizer,
            transformer=transformer,
            text_encoder_select_layers=LAYERS,
        ).save_pretrained(folder)
