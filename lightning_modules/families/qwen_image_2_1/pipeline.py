"""diffusers' Qwen-Image-2.1 pipeline for condition images that are latents."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_modules.families.patches import LatentPipeline
from lightning_modules.families.qwen_image.pipeline import replaced_shapes
from lightning_modules.families.qwen_image_2_1.denoise import latent_shapes, latent_tokens, target_latents


class NoTemplate:
    """Stand-in for the processor if no prompts are encoded: the stock constructor tokenizes the template."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return the tokens of no message."""
        return [[]]


class LatentSequence(LatentPipeline):
    """Mixin of QwenImage21Pipeline: prompts and condition images that are encoded already."""

    def __init__(
        self, scheduler: Any, vae: Any, text_encoder: Any, processor: Any, transformer: Any, sample_sigmas: Any = None
    ) -> None:
        processor = processor or NoTemplate()
        super().__init__(scheduler, vae, text_encoder, processor, transformer, sample_sigmas)  # type: ignore[call-arg]

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        # In the order in which the pipeline encodes prompts.
        names = ("image_pad_mask", "negative_image_pad_mask")
        self._masks = [arguments.pop(name) for name in names if name in arguments]
        target = torch.empty(0, 0, *(side // self.vae_scale_factor for side in reversed(size)))
        with replaced_shapes(self.transformer, latent_shapes([*controls, target])):
            return super().edit(controls, size, **arguments)

    unpacked = staticmethod(target_latents)

    def encode_prompt(self, prompt_embeds: Tensor, **others: Any) -> tuple[Tensor, None, Tensor]:
        return prompt_embeds, None, self._masks.pop(0)

    def prepare_latents(self, images: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        latents, _ = super().prepare_latents(None, *args, **kwargs)  # type: ignore[misc]
        return latents, latent_tokens(self.controls).to(latents) if self.controls else None
