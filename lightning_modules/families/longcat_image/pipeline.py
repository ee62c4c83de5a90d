"""diffusers' LongCat pipeline for a condition image that is latents."""

from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from lightning_modules.families.longcat_image.denoise import longcat_velocity
from lightning_modules.family import dynamic_mu


class NoProcessor:
    """Stands in for the processor if no prompts are encoded: the stock constructor reads its attribute."""

    image_processor = None


class LatentLongCat:
    """Mixin of LongCatImageEditPipeline, whose own call makes images of about the size of its single input."""

    scheduler: Any
    transformer: Any
    vae_scale_factor: int

    def __init__(
        self, scheduler: Any, vae: Any, text_encoder: Any, tokenizer: Any, text_processor: Any, transformer: Any
    ) -> None:
        processor: Any = text_processor or NoProcessor()
        super().__init__(scheduler, vae, text_encoder, tokenizer, processor, transformer)  # type: ignore[call-arg]

    @torch.no_grad()
    def edit(
        self,
        controls: list[Tensor],
        size: tuple[int, int],
        *,
        prompt_embeds: Tensor,
        num_inference_steps: int,
        generator: list[torch.Generator],
        guidance_scale: float = 1.0,
        negative_prompt_embeds: Tensor | None = None,
    ) -> Tensor:
        """Sample images of `size` (width, height), as latents (B, C, h, w); controls are latents (B, C, ...)."""
        width, height = (side // self.vae_scale_factor for side in size)
        transformer, device = self.transformer, self.transformer.device
        shape = (len(generator), transformer.config.in_channels // 4, height, width)
        latents = randn_tensor(shape, generator=generator, device=device, dtype=prompt_embeds.dtype)
        controls = [control.to(latents) for control in controls]
        # The scheduler's timesteps, shifted as in the stock pipeline for this many tokens.
        sigmas = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps)
        mu = dynamic_mu(self.scheduler.config, height * width // 4, num_inference_steps)
        self.scheduler.set_timesteps(sigmas=sigmas, device=device, mu=mu)
        for now in self.scheduler.timesteps:
            self._current_timestep = now
            t = now.expand(len(latents)).to(latents.dtype) / 1000
            predicted = longcat_velocity(transformer, latents, t, controls, {"prompt_embeds": prompt_embeds})
            if negative_prompt_embeds is not None:
                away = longcat_velocity(transformer, latents, t, controls, {"prompt_embeds": negative_prompt_embeds})
                predicted = away + guidance_scale * (predicted - away)
            latents = self.scheduler.step(predicted, now, latents, return_dict=False)[0]
        self._current_timestep = None
        return latents
