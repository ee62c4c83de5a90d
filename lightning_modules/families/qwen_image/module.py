"""Qwen-Image-Edit and Edit-Plus: a 20B MMDiT conditioned by a vision-language model (arXiv 2508.02324)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from datamodules.batch import copy_to
from datamodules.errors import UserError
from datamodules.images.conditions import ConditionImages
from datamodules.images.transforms import size_of_area
from lightning_modules.edit_module import EditModule
from lightning_modules.execution.last_block import QWEN_UNREAD, LastBlock, qwen_last_block, target_alone
from lightning_modules.patches import pack, unpack

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class QwenImageEdit(EditModule):
    """Qwen-Image-Edit: one condition image, which the text encoder sees too.

    Args:
        vae_image_size: pixels that condition images are resized to for the autoencoder, in their own proportions;
            None for their own size.
        condition_image_size: the same for the text encoder.
    """

    pipeline_name = "QwenImageEditPipeline"
    transformer_class = "QwenImageTransformer2DModel"
    text_components = ("tokenizer", "processor", "text_encoder")
    lora_prefix = "diffusion_model."
    most_condition_images = 1

    def __init__(self, vae_image_size: int | None, condition_image_size: int | None, **settings: Any) -> None:
        super().__init__(**settings)
        if condition_image_size is None:
            raise UserError("model.condition_image_size=null: the text encoder sees every image, at a number of pixels")
        self._statistics: dict[tuple[str, torch.device], Tensor] = {}
        self.condition_images = ConditionImages(self.most_condition_images, 1, vae_image_size, condition_image_size)

    def encoding_settings(self) -> dict[str, Any]:
        sizes = self.condition_images
        return {"vae_image_size": sizes.vae_image_size, "condition_image_size": sizes.condition_image_size}

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.qwen_image.pipeline import LatentEditPipeline

        return LatentEditPipeline

    def encode_prompt(self, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """prompt_embeds (L, D) and prompt_embeds_mask (L,), by the pipeline's own template."""
        parts = dict.fromkeys((*self.text_components, "scheduler", "vae", "transformer"))
        # The language model without its head, whose logits nobody needs.
        parts |= {"processor": self.components["processor"], "text_encoder": self.components["text_encoder"].model}
        device = self.components.device("text_encoder")
        embeds, mask = self.pipeline_class()(**parts)._get_qwen_prompt_embeds(prompt, images, device, self.base_dtype)
        return {"prompt_embeds": embeds[0], "prompt_embeds_mask": mask[0]}

    def prompt_shapes(self, prompt: str, images: list[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """Text at four characters a token; of images one token for 28x28 pixels, and a few words between."""
        area = self.condition_images.condition_image_size
        assert area is not None
        seen = [size_of_area(*image, area) for image in images]
        tokens = sum(round(width / 28) * round(height / 28) + 8 for width, height in seen)
        return {"prompt_embeds": (8 + len(prompt) // 4 + tokens, self.meta_transformer().config.joint_attention_dim)}

    # Images: the autoencoder is one for videos, (B, C, 1, H, W)

    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.components["vae"].encode(self.for_vae(pixels).unsqueeze(2)).latent_dist
        return latent.mode().squeeze(2).to(self.main_device), latent.std.squeeze(2).to(self.main_device)

    def _statistic(self, name: str, latents: Tensor) -> Tensor:
        """A number for each channel of the latents."""
        if (name, latents.device) not in self._statistics:
            statistic = torch.tensor(self.vae_config[name]).view(1, -1, 1, 1)
            self._statistics[name, latents.device] = statistic.to(latents.device)
        return self._statistics[name, latents.device].to(latents.dtype)

    def normalize(self, latents: Tensor) -> Tensor:
        return (latents - self._statistic("latents_mean", latents)) / self._statistic("latents_std", latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.components["vae"]
        latents = latents.to(self.components.device("vae"), self.base_dtype)
        inverse = 1 / self._statistic("latents_std", latents.float())  # as the pipeline rounds in bf16
        latents = latents / inverse.to(latents) + self._statistic("latents_mean", latents)
        return vae.decode(latents.unsqueeze(2)).sample.squeeze(2).float().cpu()

    # The transformer

    def velocity(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        transformer: Any = self.transformer
        images = [x_t, *controls]
        # A sample alone has no padding; kernels without a mask are the faster ones.
        mask = prompt.get("prompt_embeds_mask")
        if len(x_t) == 1 or (mask is not None and mask.all()):
            mask = None
        height, width = x_t.shape[-2:]
        count = height * width // 4
        with target_alone(transformer.transformer_blocks[-1], count):
            predicted = transformer(
                hidden_states=torch.cat([pack(image) for image in images], dim=1),
                timestep=t,
                encoder_hidden_states=prompt["prompt_embeds"],
                encoder_hidden_states_mask=None if mask is None else copy_to(mask, x_t.device),
                img_shapes=image_shapes([image.shape[-2:] for image in images], len(x_t)),
                return_dict=False,
            )[0]
        return unpack(predicted[:, :count], height, width)

    def cut_last_block(self, transformer: Any) -> None:
        block = transformer.transformer_blocks[-1]
        block.forward = LastBlock(block, qwen_last_block, QWEN_UNREAD)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509 and -2511: up to three condition images."""

    pipeline_name = "QwenImageEditPlusPipeline"
    most_condition_images = 3

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.qwen_image.pipeline import LatentEditPlusPipeline

        return LatentEditPlusPipeline


def image_shapes(latents: Sequence[Sequence[int]], samples: int) -> list[list[tuple[int, int, int]]]:
    """The sides 2H, 2W of each image's latent -> for every sample the (frames, H, W) that the transformer wants."""
    return [[(1, height // 2, width // 2) for height, width in latents]] * samples
