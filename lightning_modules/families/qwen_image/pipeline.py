"""diffusers' Qwen editing pipelines, for condition images that are latents."""

from typing import Any

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from PIL import Image
from torch import Tensor

from lightning_modules.families.qwen_image.denoise import image_shapes
from lightning_modules.patches import pack, unpack


class LatentControls:
    """What both pipelines lack: condition images that are encoded already, any number, each at its own size."""

    controls: list[Tensor]

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        """Pictures of `size` (width, height), as latents (B, C, h, w); controls are (B, C, ...)."""
        width, height = size
        pipeline: Any = self
        height_in_latents, width_in_latents = height // pipeline.vae_scale_factor, width // pipeline.vae_scale_factor
        sides = [(height_in_latents, width_in_latents), *(control.shape[-2:] for control in controls)]
        shapes = image_shapes(sides, len(arguments["generator"]))
        self.controls = controls
        # The pipelines work out the shapes from an image that is resized to one megapixel: ours may be others.
        hook = pipeline.transformer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "img_shapes": shapes}), with_kwargs=True
        )
        try:
            latents = pipeline(
                image=[Image.new("RGB", (1, 1))],  # stands in for the controls
                height=height,
                width=width,
                output_type="latent",
                **arguments,
            ).images
        finally:
            hook.remove()
        return unpack(latents, height_in_latents, width_in_latents)

    def prepare_latents(self, image: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        latents, _ = super().prepare_latents(None, *args, **kwargs)  # type: ignore[misc]
        return latents, torch.cat([pack(control) for control in self.controls], dim=1).to(latents)

    @property
    def _execution_device(self) -> torch.device:
        pipeline: Any = self
        return pipeline.transformer.device


class LatentEditPipeline(LatentControls, QwenImageEditPipeline):
    """The stock pipeline for latents."""


class LatentEditPlusPipeline(LatentControls, QwenImageEditPlusPipeline):
    """The stock pipeline for latents."""
