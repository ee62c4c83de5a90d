"""Z-Image: one stream of text and image tokens (arXiv 2511.22699)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from datamodules.batch import stack_padded
from datamodules.images.windows import ConditionImages
from lightning_modules.families.kl_autoencoder import KLAutoencoder
from lightning_modules.families.z_image.denoise import z_image_velocity
from lightning_modules.families.z_image.native_names import NATIVE_NAMES
from lightning_modules.family import Geometry, Layers, Parts, SamplingRules

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class ZImage(KLAutoencoder):
    """Z-Image, text to image.

    Args:
        max_sequence_length: text tokens; longer prompts are truncated.
        settings: of `EditModule`.
    """

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

    def __init__(self, max_sequence_length: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.max_sequence_length: int = max_sequence_length

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return prompt_embeds (L, D) of the chat that begins with the prompt, and prompt_embeds_mask (L,)."""
        return {name: tensor[0] for name, tensor in self.encode_prompts(parts, [prompt]).items()}

    def encode_prompts(self, parts: Parts, prompts: list[str]) -> dict[str, Tensor]:
        counts, length = self.prompt_tokens(parts, prompts)
        device = parts.device("text_encoder")
        tokens = parts["tokenizer"](
            _chats(parts["tokenizer"], prompts),
            padding="max_length",
            padding_side="right",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        )
        hidden_states = (
            parts["text_encoder"]
            .base_model(  # without its head, whose logits are not needed
                input_ids=tokens.input_ids.to(device),
                attention_mask=tokens.attention_mask.to(device).bool(),
                output_hidden_states=True,
            )
            .hidden_states
        )
        embeds = hidden_states[-2].to(parts.dtype)
        own = [one[: min(count, length)] for one, count in zip(embeds, counts, strict=True)]
        masks = [torch.ones(len(one), dtype=torch.int64, device="cpu") for one in own]
        return stack_padded(
            [{"prompt_embeds": one, "prompt_embeds_mask": mask} for one, mask in zip(own, masks, strict=True)]
        )

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape, at four characters a token, including the chat template."""
        return {"prompt_embeds": (min(8 + len(prompt) // 4, self.max_sequence_length), config["cap_feat_dim"])}

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        tokenizer = parts["tokenizer"]
        return [len(ids) for ids in tokenizer(_chats(tokenizer, prompts)).input_ids], self.max_sequence_length

    # Images

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        latents = latents.to(vae.dtype)  # before scaling, as the pipeline rounds in bf16
        return vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample

    # The transformer

    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        return z_image_velocity(transformer, x_t, t, prompt)

    # Prediction

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.z_image.pipeline import LatentZImagePipeline

        return LatentZImagePipeline


def _chats(tokenizer: Any, prompts: list[str]) -> list[str]:
    """Return the prompts in the chat template, up to the beginning of the answer."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for prompt in prompts
    ]
