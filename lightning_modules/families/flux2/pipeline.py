"""diffusers' FLUX.2 pipelines for references that are latents."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lightning_modules.families.flux2.denoise import flux2_image_ids
from lightning_modules.families.patches import LatentPipeline, unpack


class LatentReferences(LatentPipeline):
    """Mixin of both pipelines: references that are encoded already."""

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        stand_in = Image.new("RGB", (64, 64)) if controls else None
        return super().edit(controls, size, image=stand_in, **arguments)

    def prepare_image_latents(
        self, images: Any, batch_size: int, generator: Any, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ids = flux2_image_ids(self.controls, first=1).expand(batch_size, -1, -1)
        return self.packed_controls().to(device, dtype), ids.to(device)


class LatentKlein(LatentReferences):
    """Mixin of Flux2KleinPipeline, which returns latents unnormalized, so the tokens of the last step are kept."""

    def unpacked(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return unpack(self._last, height, width)

    def _unpack_latents_with_ids(self, x: Tensor, *args: Any) -> Tensor:
        self._last = x
        return super()._unpack_latents_with_ids(x, *args)  # type: ignore[misc]
