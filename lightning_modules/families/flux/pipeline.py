"""diffusers' Kontext pipeline for controls that are latents."""

from typing import Any

import torch
from torch import Tensor

from lightning_modules.families.flux.denoise import position_ids
from lightning_modules.families.patches import LatentPipeline


class LatentKontext(LatentPipeline):
    """Mixin of FluxKontextPipeline."""

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        return super().edit(controls, size, image=None, max_area=size[0] * size[1], **arguments)

    def prepare_latents(self, image: None, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        latents, _, latent_ids, _ = super().prepare_latents(image, batch_size, *args, **kwargs)  # type: ignore[misc]
        if not self.controls:
            return latents, None, latent_ids, None
        ids = torch.cat([position_ids(control, k) for k, control in enumerate(self.controls, 1)])
        return latents, self.packed_controls().to(latents), latent_ids, ids.to(latent_ids)
