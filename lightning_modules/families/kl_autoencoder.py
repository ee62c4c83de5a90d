"""Base class of families whose autoencoder is diffusers' AutoencoderKL."""

from typing import Any

from torch import Tensor

from lightning_modules.edit_module import EditModule


class KLAutoencoder(EditModule):
    """Shifts and scales latents by two values of the autoencoder's config."""

    def encode_pixels(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        latent = vae.encode(pixels).latent_dist
        return latent.mode(), latent.std

    def normalize(self, latents: Tensor) -> Tensor:
        config = self.base.vae_config
        return (latents - config["shift_factor"]) * config["scaling_factor"]

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(latents.to(vae.dtype)).sample
