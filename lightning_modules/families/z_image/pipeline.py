"""diffusers' Z-Image pipeline for prompts of several lengths in one tensor."""

from typing import Any

from torch import Tensor

from lightning_modules.families.patches import LatentPipeline
from lightning_modules.families.z_image.denoise import real_tokens


class LatentZImage(LatentPipeline):
    """Mixin of ZImagePipeline, whose transformer takes latents as they are."""

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        for name in ("prompt_embeds", "negative_prompt_embeds"):
            mask = arguments.pop(f"{name}_mask", None)
            if name in arguments:
                arguments[name] = real_tokens(arguments[name], mask)
        return super().edit(controls, size, **arguments)

    def unpacked(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return tokens
