"""diffusers' Qwen pipelines, for condition images that are latents."""

from typing import Any

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from PIL import Image
from torch import Tensor

from lightning_modules.families.qwen_image.denoise import image_shapes
from lightning_modules.patches import pack, unpack


class Latents:
    """What all lack: latents as a result, whatever devices the components are on."""

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        """Pictures of `size` (width, height), as latents (B, C, h, w); controls are (B, C, ...)."""
        width, height = size
        pipeline: Any = self
        latents = pipeline(height=height, width=width, output_type="latent", **arguments).images
        return unpack(latents, height // pipeline.vae_scale_factor, width // pipeline.vae_scale_factor)

    @property
    def _execution_device(self) -> torch.device:
        pipeline: Any = self
        return pipeline.transformer.device


class LatentControls(Latents):
    """What those that edit lack: condition images that are encoded already, any number, each at its own size."""

    controls: list[Tensor]

    def edit(self, controls: list[Tensor], size: tuple[int, int], **arguments: Any) -> Tensor:
        width, height = size
        pipeline: Any = self
        target = height // pipeline.vae_scale_factor, width // pipeline.vae_scale_factor
        shapes = image_shapes([target, *(control.shape[-2:] for control in controls)], len(arguments["generator"]))
        self.controls = controls
        # The pipelines work out the shapes from an image that is resized to one megapixel: ours may be others.
        hook = pipeline.transformer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "img_shapes": shapes}), with_kwargs=True
        )
        try:
            stand_in = [Image.new("RGB", (1, 1))]  # for the controls
            return super().edit(controls, size, image=stand_in, **arguments)
        finally:
            hook.remove()

    def prepare_latents(self, image: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        latents, _ = super().prepare_latents(None, *args, **kwargs)  # type: ignore[misc]
        return latents, torch.cat([pack(control) for control in self.controls], dim=1).to(latents)


class LatentPipeline(Latents, QwenImagePipeline):
    """The stock pipeline for latents."""


class LatentEditPipeline(LatentControls, QwenImageEditPipeline):
    """The stock pipeline for latents."""


class LatentEditPlusPipeline(LatentControls, QwenImageEditPlusPipeline):
    """The stock pipeline for latents."""
