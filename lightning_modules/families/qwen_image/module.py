"""Qwen-Image, Edit and Edit-Plus: a 20B MMDiT conditioned by a vision-language model (arXiv 2508.02324)."""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from datamodules.batch import Geometry
from datamodules.images.decoding import size_of_area
from datamodules.images.windows import ConditionImages
from foundation.errors import UserError
from lightning_modules.edit_module import EditModule
from lightning_modules.families.patches import LatentPipeline
from lightning_modules.families.qwen_image.denoise import qwen_velocity
from lightning_modules.families.qwen_image.pipeline import LatentControls
from lightning_modules.family import ATTENTION, TEXT_ATTENTION, Layers, Parts, text_pipeline
from lightning_modules.lora_files.names import NativeNames


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return one value for each channel (1, C, 1, 1); copying it each time would wait for the GPU."""
    return torch.tensor(values).view(1, -1, 1, 1).to(device)


class QwenLatents(EditModule):
    """A family with Qwen-Image's autoencoder, which is made for videos, (B, C, 1, H, W)."""

    def encode_pixels(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        latent = vae.encode(pixels.unsqueeze(2)).latent_dist
        return latent.mode().squeeze(2), latent.std.squeeze(2)

    def _statistic(self, name: str, latents: Tensor) -> Tensor:
        """Return one value for each channel of the latents."""
        return _channels(tuple(self.base.vae_config[name]), latents.device).to(latents.dtype)

    def normalize(self, latents: Tensor) -> Tensor:
        return (latents - self._statistic("latents_mean", latents)) / self._statistic("latents_std", latents)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        latents = latents.to(vae.dtype)
        inverse = 1 / self._statistic("latents_std", latents.float())  # as the pipeline rounds in bf16
        latents = latents / inverse.to(latents) + self._statistic("latents_mean", latents)
        return vae.decode(latents.unsqueeze(2)).sample.squeeze(2)


class QwenImage(QwenLatents):
    """Qwen-Image and Qwen-Image-2512: text to image.

    Attributes:
        most_text_tokens: limit of a prompt with the end of its template; None for no limit, as images' tokens count.
    """

    pipeline_name = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    text_components: ClassVar[tuple[str, ...]] = ("tokenizer", "text_encoder")
    condition_images = ConditionImages(most=0)
    # As musubi-tuner: both streams' attention and MLPs, 67 % of the weights; not the modulation.
    layers = Layers(
        NativeNames(unused=("__index_timestep_zero__",), marks={"__index_timestep_zero__": "zero_cond_t"}),
        targets=(
            *ATTENTION,
            *TEXT_ATTENTION,
            *(f"{stream}_mlp.net.{end}" for stream in ("img", "txt") for end in ("0.proj", "2")),
        ),
    )
    latent_pipeline: type = LatentPipeline
    unread = ("attn.to_add_out.", "txt_mlp.")
    most_text_tokens: ClassVar[int | None] = 512  # as its pipeline does unless told otherwise

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return prompt_embeds (L, D) and prompt_embeds_mask (L,), by the pipeline's own template."""
        seen = {"image": images} if images else {}
        where = {"device": parts.device("text_encoder"), "dtype": parts.dtype}
        pipeline = text_pipeline(self.pipeline_name, parts, self.text_components)
        [embeds], [mask] = pipeline._get_qwen_prompt_embeds(prompt, **seen, **where)
        most = self.most_text_tokens
        return {"prompt_embeds": embeds[:most], "prompt_embeds_mask": mask[:most]}

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int] | None:
        if self.most_text_tokens is None:
            return None
        pipeline = text_pipeline(self.pipeline_name, parts, ["tokenizer"])
        chats = [pipeline.prompt_template_encode.format(prompt) for prompt in prompts]
        counts = [len(ids) - pipeline.prompt_template_encode_start_idx for ids in pipeline.tokenizer(chats).input_ids]
        return counts, self.most_text_tokens

    def text_length(self, prompt: str, images: list[tuple[int, int]]) -> int:
        """Return the length at four characters a token."""
        return 8 + len(prompt) // 4

    # The transformer

    velocity = staticmethod(qwen_velocity)


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: one condition image, which the text encoder sees as well.

    Args:
        vae_image_size: pixels that condition images are resized to for the autoencoder, keeping their proportions;
            None for their own size.
        condition_image_size: pixels for the text encoder.
        settings: arguments of `EditModule`.
    """

    pipeline_name = "QwenImageEditPipeline"
    text_components = ("tokenizer", "processor", "text_encoder")
    geometry = Geometry(side_multiple=32)  # its pipelines round so
    latent_pipeline = LatentControls
    most_condition_images = 1
    most_text_tokens = None

    def __init__(self, vae_image_size: int | None, condition_image_size: int | None, **settings: Any) -> None:
        super().__init__(**settings)
        if condition_image_size is None:
            raise UserError(
                "model.condition_image_size=null: the text encoder sees each image. Set a number of pixels."
            )
        self.condition_image_size = condition_image_size
        self.condition_images = ConditionImages(self.most_condition_images, 1, vae_image_size, condition_image_size)

    def encoding_settings(self) -> dict[str, Any]:
        return {
            "vae_image_size": self.condition_images.vae_image_size,
            "condition_image_size": self.condition_image_size,
        }

    def text_length(self, prompt: str, images: list[tuple[int, int]]) -> int:
        """Return the length of the text and, for images, one token for 28x28 pixels, with a few words between them."""
        seen = [size_of_area(*image, self.condition_image_size) for image in images]
        tokens = sum(round(width / 28) * round(height / 28) + 8 for width, height in seen)
        return super().text_length(prompt, images) + tokens


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509 and -2511: up to three condition images."""

    pipeline_name = "QwenImageEditPlusPipeline"
    most_condition_images = 3
