"""Qwen-Image, Edit and Edit-Plus: a 20B MMDiT conditioned by a vision-language model (arXiv 2508.02324)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.images.decoding import size_of_area
from datamodules.images.windows import ConditionImages
from lightning_modules.edit_module import EditModule
from lightning_modules.families.qwen_image import denoise, text
from lightning_modules.family import Geometry, Parts
from lightning_modules.layers import ATTENTION, TEXT_ATTENTION, Layers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class QwenImage(EditModule):
    """Qwen-Image and Qwen-Image-2512: text to image.

    Attributes:
        most_text_tokens: how many a prompt has at most, its template's end among them; None for any number, as where
            the tokens of images are among them.
    """

    pipeline_name = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    text_components: ClassVar[tuple[str, ...]] = ("tokenizer", "text_encoder")
    condition_images = ConditionImages(most=0)
    # As musubi-tuner: both streams' attention and MLPs, 67 % of the weights; not the modulation.
    layers = Layers(
        targets=(
            *ATTENTION,
            *TEXT_ATTENTION,
            *(f"{stream}_mlp.net.{end}" for stream in ("img", "txt") for end in ("0.proj", "2")),
        )
    )
    most_text_tokens: ClassVar[int | None] = 512  # as its pipeline does unless told otherwise

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._statistics: dict[tuple[str, torch.device], Tensor] = {}

    # Text

    def encoding_settings(self) -> dict[str, Any]:
        return {}

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.qwen_image.pipeline import LatentPipeline

        return LatentPipeline

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """prompt_embeds (L, D) and prompt_embeds_mask (L,), by the pipeline's own template."""
        embeds, mask = text.embeddings(self.pipeline_class(), parts, self.text_components, prompt, images)
        most = self.most_text_tokens
        return {"prompt_embeds": embeds[:most], "prompt_embeds_mask": mask[:most]}

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int] | None:
        if self.most_text_tokens is None:
            return None
        return text.token_counts(self.pipeline_class(), parts["tokenizer"], prompts), self.most_text_tokens

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        """Text at four characters a token."""
        return {"prompt_embeds": (8 + len(prompt) // 4, config["joint_attention_dim"])}

    # Images: the autoencoder is one for videos, (B, C, 1, H, W)

    def encode_pixels(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        latent = vae.encode(pixels.unsqueeze(2)).latent_dist
        return latent.mode().squeeze(2), latent.std.squeeze(2)

    def _statistic(self, name: str, latents: Tensor) -> Tensor:
        """A number for each channel of the latents."""
        if (name, latents.device) not in self._statistics:
            statistic = torch.tensor(self.base.vae_config[name]).view(1, -1, 1, 1)
            self._statistics[name, latents.device] = statistic.to(latents.device)
        return self._statistics[name, latents.device].to(latents.dtype)

    def normalize(self, latents: Tensor) -> Tensor:
        return (latents - self._statistic("latents_mean", latents)) / self._statistic("latents_std", latents)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        latents = latents.to(vae.dtype)
        inverse = 1 / self._statistic("latents_std", latents.float())  # as the pipeline rounds in bf16
        latents = latents / inverse.to(latents) + self._statistic("latents_mean", latents)
        return vae.decode(latents.unsqueeze(2)).sample.squeeze(2)

    # The transformer

    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        return denoise.velocity(transformer, x_t, t, controls, prompt)

    def trim_last_block(self, transformer: Any) -> None:
        denoise.trim_last_block(transformer)


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: one condition image, which the text encoder sees too.

    Args:
        vae_image_size: pixels that condition images are resized to for the autoencoder, in their own proportions;
            None for their own size.
        condition_image_size: the same for the text encoder.
        settings: of `EditModule`.
    """

    pipeline_name = "QwenImageEditPipeline"
    text_components = ("tokenizer", "processor", "text_encoder")
    geometry = Geometry(side_multiple=32)  # its pipelines round so
    most_condition_images = 1
    most_text_tokens = None

    def __init__(self, vae_image_size: int | None, condition_image_size: int | None, **settings: Any) -> None:
        super().__init__(**settings)
        if condition_image_size is None:
            raise UserError("model.condition_image_size=null: the text encoder sees every image, at a number of pixels")
        self.condition_images = ConditionImages(self.most_condition_images, 1, vae_image_size, condition_image_size)

    def encoding_settings(self) -> dict[str, Any]:
        sizes = self.condition_images
        return {"vae_image_size": sizes.vae_image_size, "condition_image_size": sizes.condition_image_size}

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.qwen_image.pipeline import LatentEditPipeline

        return LatentEditPipeline

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        """The same, and of images one token for 28x28 pixels, and a few words between."""
        area = self.condition_images.condition_image_size
        assert area is not None
        seen = [size_of_area(*image, area) for image in images]
        tokens = sum(round(width / 28) * round(height / 28) + 8 for width, height in seen)
        length, width = super().prompt_shapes(config, prompt, images)["prompt_embeds"]
        return {"prompt_embeds": (length + tokens, width)}


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509 and -2511: up to three condition images."""

    pipeline_name = "QwenImageEditPlusPipeline"
    most_condition_images = 3

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.qwen_image.pipeline import LatentEditPlusPipeline

        return LatentEditPlusPipeline
