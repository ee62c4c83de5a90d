"""diffusers' Z-Image pipeline, for prompts of several lengths in one tensor."""

from typing import Any

import torch
from diffusers import ZImagePipeline
from torch import Tensor

from lightning_modules.families.z_image.denoise import real_tokens


class LatentZImagePipeline(ZImagePipeline):
    """The stock pipeline from embeddings to latents."""

    def edit(
        self,
        controls: list[Tensor],
        size: tuple[int, int],
        prompt_embeds: Tensor,
        prompt_embeds_mask: Tensor,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_embeds_mask: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Pictures of `size` (width, height), as latents (B, C, h, w); it takes no controls, and prompts (B, L, D)."""
        width, height = size
        negative = None
        if negative_prompt_embeds is not None:
            negative = real_tokens(negative_prompt_embeds, negative_prompt_embeds_mask)
        return self(
            prompt_embeds=real_tokens(prompt_embeds, prompt_embeds_mask),
            negative_prompt_embeds=negative,
            height=height,
            width=width,
            output_type="latent",
            **arguments,
        ).images

    @property
    def _execution_device(self) -> torch.device:
        # The stock answer is the device of whichever component comes first; ours may live on several.
        return self.transformer.device
