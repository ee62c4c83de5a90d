"""Z-Image: one stream of text and image tokens (arXiv 2511.22699)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datamodules.batch import Geometry, stack_padded
from datamodules.images.windows import ConditionImages
from lightning_modules.edit_module import EditModule
from lightning_modules.families.z_image.denoise import z_image_velocity
from lightning_modules.families.z_image.pipeline import LatentZImage
from lightning_modules.family import Layers, Parts, SamplingRules, chat_tokens, text_pipeline
from lightning_modules.lora_files.names import NativeNames

# Blocks that see the noisy image, the text, and both.
BLOCKS = ("noise_refiner.{}", "context_refiner.{}", "layers.{}")
QKV = ("to_q", "to_k", "to_v")

# As in Z-Image's own code. Files are written with diffusers' names: ComfyUI knows these, and musubi's and OneTrainer's
# models have no others.
NATIVE_NAMES = NativeNames(
    read_only={
        "x_embedder": ("all_x_embedder.2-1",),
        **{f"{block}.attention.qkv": tuple(f"{block}.attention.{name}" for name in QKV) for block in BLOCKS},
        **{f"{block}.attention.out": (f"{block}.attention.to_out.0",) for block in BLOCKS},
        "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
        "final_layer.linear": ("all_final_layer.2-1.linear",),
    },
    readers="z_image",
    tensors={f"{one}.attention.{n}_norm.weight": f"{one}.attention.norm_{n}.weight" for one in BLOCKS for n in "qk"},
    unused=(r"norm_final\.weight",),
)


class ZImage(EditModule):
    """Z-Image, text to image."""

    pipeline_name = "ZImagePipeline"
    transformer_class = "ZImageTransformer2DModel"
    text_components = ("tokenizer", "text_encoder")
    condition_images = ConditionImages(most=0)
    geometry = Geometry(packed=False)
    # As DiffSynth-Studio: attention and MLPs.
    layers = Layers(
        NATIVE_NAMES,
        ("to_k", "to_q", "to_v", "to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        output="all_final_layer.*.linear",
        flattened=("all_x_embedder.*", "cap_embedder.*"),
    )
    sampling_rules = SamplingRules("guidance_scale", 0.0)
    latent_pipeline = LatentZImage

    # Text

    def encode_prompts(self, parts: Parts, prompts: list[str]) -> dict[str, Tensor]:
        """Return prompt_embeds (B, L, D) of the chats that begin with the prompts, and prompt_embeds_mask (B, L)."""
        pipeline = text_pipeline(self.pipeline_name, parts, self.text_components)
        device, length = parts.device("text_encoder"), self.max_sequence_length
        own = pipeline._encode_prompt(list(prompts), device, max_sequence_length=length)
        masks = [torch.ones(len(one), dtype=torch.int64, device="cpu") for one in own]
        return stack_padded(
            [
                {"prompt_embeds": one.to(parts.dtype), "prompt_embeds_mask": mask}
                for one, mask in zip(own, masks, strict=True)
            ]
        )

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        length = min(8 + len(prompt) // 4, self.max_sequence_length)  # with the template, at four characters a token
        return {"prompt_embeds": (length, config["cap_feat_dim"])}

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        return chat_tokens(parts["tokenizer"], prompts, True), self.max_sequence_length

    # The transformer

    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        return z_image_velocity(transformer, x_t, t, prompt)
