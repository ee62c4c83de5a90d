"""A tiny FLUX.3 pipeline of the real classes, random and in float32, and the stock pipeline."""

from pathlib import Path
from typing import Any

import torch
from diffusers import Flux3AutoBlocks, Flux3Transformer2DModel
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.support.tiny_flux2 import LANGUAGE_MODEL, flux2_parts
from tests.support.tiny_parts import CHAT, QWEN3_TEMPLATE, VISION, build_tokenizer, qwen_vl_settings, spread


def build_flux3(folder: Path) -> None:
    """Write a Flux3ModularPipeline, whose text encoder has the layers that are read and one more."""
    torch.manual_seed(8)
    tokenizer = build_tokenizer([*CHAT, *VISION], QWEN3_TEMPLATE, pad="<|endoftext|>")
    settings = qwen_vl_settings(tokenizer)
    rope = settings["text_config"]["rope_parameters"] | {"mrope_section": [1, 1, 2]}
    settings["text_config"] |= LANGUAGE_MODEL | {"num_hidden_layers": 33, "rope_parameters": rope}
    settings["vision_config"] |= {"out_hidden_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    text_encoder = spread(Qwen3VLForConditionalGeneration(Qwen3VLConfig(**settings)), 0.3)
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen3VLVideoProcessor(), chat_template=QWEN3_TEMPLATE
    )
    transformer = Flux3Transformer2DModel(
        in_channels=16,
        cond_in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=128,
        timestep_channels=32,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
    )
    pipeline = Flux3AutoBlocks().init_pipeline()
    vae = flux2_parts(guidance_embeds=False)["vae"]
    pipeline.update_components(text_encoder=text_encoder, tokenizer=processor, vae=vae, transformer=transformer)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)


class StockFlux3:
    """The stock pipeline without its prompt upsampler, called as others are."""

    def __init__(self, repository: Path, torch_dtype: torch.dtype = torch.float32) -> None:
        blocks = Flux3AutoBlocks()
        blocks.sub_blocks.pop("prompt_upsampler")
        self.pipeline = blocks.init_pipeline(str(repository))
        self.pipeline.load_components(torch_dtype=torch_dtype)
        names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")
        self.components = {name: getattr(self.pipeline, name) for name in names}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)

    def set_progress_bar_config(self, **how: Any) -> None:
        for way in self.pipeline._blocks.sub_blocks["denoise"].sub_blocks.values():
            way.sub_blocks["denoise"].set_progress_bar_config(**how)

    def __call__(self, guidance_scale: float, **call: Any) -> Any:
        self.pipeline.guider.guidance_scale = guidance_scale
        return self.pipeline(**call)
