"""diffusers' FLUX.2 pipelines, for references that are latents."""

from typing import Any

import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from PIL import Image
from torch import Tensor

from lightning_modules.families.flux2.denoise import image_ids
from lightning_modules.patches import pack, unpack


class LatentReferences:
    """What both pipelines lack: references that are encoded already, any number, each at its own size."""

    references: list[Tensor]

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        """Pictures of `size` (width, height), as normalized latents (B, C, h, w); controls are (B, C, ...)."""
        pipeline: Any = self
        width, height = size
        self.references = controls
        stand_in = Image.new("RGB", (64, 64)) if controls else None
        made = pipeline(image=stand_in, height=height, width=width, output_type="latent", **arguments).images
        return unpack(self.tokens(made), height // pipeline.vae_scale_factor, width // pipeline.vae_scale_factor)

    def tokens(self, made: Tensor) -> Tensor:
        """What the last step gave, (B, N, 4C), of what the pipeline returns."""
        return made

    def prepare_image_latents(
        self, images: Any, batch_size: int, generator: Any, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        tokens = torch.cat([pack(reference) for reference in self.references], dim=1)
        ids = image_ids(self.references, first=1).expand(batch_size, -1, -1)
        return tokens.to(device, dtype), ids.to(device)

    @property
    def _execution_device(self) -> torch.device:
        # The stock answer is the device of whichever component comes first; ours may live on several.
        pipeline: Any = self
        return pipeline.transformer.device


class LatentFlux2Pipeline(LatentReferences, Flux2Pipeline):
    """The stock pipeline for latents."""


class LatentFlux2KleinPipeline(LatentReferences, Flux2KleinPipeline):
    """The stock pipeline for latents. It returns them as the autoencoder wants them: what they were made of is kept."""

    def tokens(self, made: Tensor) -> Tensor:
        return self._last

    def _unpack_latents_with_ids(self, x: Tensor, *args: Any) -> Tensor:
        self._last = x
        return super()._unpack_latents_with_ids(x, *args)
