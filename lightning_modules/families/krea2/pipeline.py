"""diffusers' Krea 2 pipeline for prompts of several lengths, and with references, which it lacks."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_modules.families.krea2.denoise import SCHEMES, EditScheme, references
from lightning_modules.families.patches import LatentPipeline


class LatentKrea2(LatentPipeline):
    """Mixin of Krea2Pipeline: references, as latents, are added to each call of its transformer."""

    scheme: EditScheme = SCHEMES["after"]

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        # The pipeline counts the positions of the prompt and uses them for the negative one as well.
        embeds = {name: one for name, one in arguments.items() if "prompt_embeds" in name}
        longest = max(one.shape[1] for one in embeds.values())
        for name, one in embeds.items():  # (B, L, ...) -> (B, longest, ...)
            arguments[name] = F.pad(one, (*[0] * 2 * (one.ndim - 2), 0, longest - one.shape[1]))
        sides = [side // self.vae_scale_factor for side in reversed(size)]
        with references(self.transformer, controls, sides, self.scheme):
            return super().edit(controls, size, **arguments)
