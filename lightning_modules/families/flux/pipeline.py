"""diffusers' Kontext pipeline, for controls that are latents."""

from typing import Any

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor

from lightning_modules.families.flux.denoise import position_ids
from lightning_modules.patches import pack, unpack


class LatentKontextPipeline(FluxKontextPipeline):
    """The stock pipeline for controls that are already latents: any number of them, each at its own size."""

    controls: list[Tensor]

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        """Pictures of `size` (width, height), as latents (B, C, h, w); controls are (B, C, ...)."""
        width, height = size
        self.controls = controls
        sides = {"height": height, "width": width, "max_area": height * width}
        latents = self(image=None, **sides, output_type="latent", **arguments).images
        return unpack(latents, height // self.vae_scale_factor, width // self.vae_scale_factor)

    def prepare_latents(self, image: None, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        latents, _, latent_ids, _ = super().prepare_latents(image, batch_size, *args, **kwargs)
        if not self.controls:
            return latents, None, latent_ids, None
        tokens = torch.cat([pack(control) for control in self.controls], dim=1)
        ids = torch.cat([position_ids(control, k) for k, control in enumerate(self.controls, 1)])
        return latents, tokens.to(latents), latent_ids, ids.to(latent_ids)

    @property
    def _execution_device(self) -> torch.device:
        # The stock answer is the device of whichever component comes first; ours may live on several.
        return self.transformer.device
