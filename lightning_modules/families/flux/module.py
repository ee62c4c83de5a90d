"""FLUX.1 dev and Kontext: an MMDiT over text, target and control tokens (arXiv 2506.15742)."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from datamodules.images.conditions import ConditionImages
from lightning_modules.edit_module import EditModule
from lightning_modules.execution.last_block import LastBlock, flux_last_block, target_alone
from lightning_modules.patches import pack, unpack

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

log = logging.getLogger("retouch")


class FluxKontext(EditModule):
    """FLUX.1 Kontext [dev]: any number of condition images, each at its own size; prediction works without any too.

    Args:
        max_sequence_length: T5 tokens; its padding is not masked, so use the same in training and prediction.
        training_guidance_scale: the guidance embedding in training; the distilled model wants 1.
    """

    pipeline_name = "FluxKontextPipeline"
    transformer_class = "FluxTransformer2DModel"
    text_components = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")

    def __init__(self, max_sequence_length: int, training_guidance_scale: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.max_sequence_length = max_sequence_length
        self.training_guidance_scale = training_guidance_scale
        self._cut: set[str] = set()  # prompts that were said to be too long

    # Text

    def encoding_settings(self) -> dict[str, Any]:
        return {"max_sequence_length": self.max_sequence_length}

    def get_clip_prompt_embeds(self, prompts: list[str]) -> Tensor:
        """CLIP's pooled output, (B, D)."""
        tokenizer, encoder = self.components["tokenizer"], self.components["text_encoder"]
        ids = self._tokenize(tokenizer, prompts, tokenizer.model_max_length)
        return encoder(ids.to(self.components.device("text_encoder"))).pooler_output.to(self.base_dtype)

    def get_t5_prompt_embeds(self, prompts: list[str]) -> Tensor:
        """T5's last hidden states, (B, max_sequence_length, D); padding is encoded like text."""
        tokenizer, encoder = self.components["tokenizer_2"], self.components["text_encoder_2"]
        ids = self._tokenize(tokenizer, prompts, self.max_sequence_length)
        for prompt, whole in zip(prompts, tokenizer(prompts).input_ids, strict=True):
            if len(whole) > self.max_sequence_length and prompt not in self._cut:
                self._cut.add(prompt)
                log.warning(
                    f"note: {len(whole)} tokens are cut to {self.max_sequence_length} (model.max_sequence_length): "
                    f'"{prompt[:60]}..."'
                )
        return encoder(ids.to(self.components.device("text_encoder_2"))).last_hidden_state.to(self.base_dtype)

    def encode_prompt(self, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """prompt_embeds (L, D) and pooled_prompt_embeds (P,)."""
        return {name: tensor[0] for name, tensor in self.encode_prompts([prompt]).items()}

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return {
            "prompt_embeds": self.get_t5_prompt_embeds(prompts),
            "pooled_prompt_embeds": self.get_clip_prompt_embeds(prompts),
        }

    def prompt_shapes(self, prompt: str, images: list[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        config = self.meta_transformer().config
        return {
            "prompt_embeds": (self.max_sequence_length, config.joint_attention_dim),
            "pooled_prompt_embeds": (config.pooled_projection_dim,),
        }

    @staticmethod
    def _tokenize(tokenizer: Any, prompts: list[str], length: int) -> Tensor:
        return tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids

    # Images

    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.components["vae"].encode(self.for_vae(pixels)).latent_dist
        return latent.mode().to(self.main_device), latent.std.to(self.main_device)

    def normalize(self, latents: Tensor) -> Tensor:
        return (latents - self.vae_config["shift_factor"]) * self.vae_config["scaling_factor"]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.components["vae"]
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(latents.to(self.components.device("vae"), self.base_dtype)).sample.float().cpu()

    # The transformer

    def velocity(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        transformer: Any = self.transformer
        images = [x_t, *controls]
        tokens = torch.cat([pack(image) for image in images], dim=1)
        image_ids = torch.cat([position_ids(image, k) for k, image in enumerate(images)])
        embeds = prompt["prompt_embeds"]
        guidance = None
        if transformer.config.guidance_embeds:
            guidance = torch.full_like(t, self.training_guidance_scale)
        height, width = x_t.shape[-2:]
        count = height * width // 4
        with target_alone(transformer.single_transformer_blocks[-1], count):
            predicted = transformer(
                hidden_states=tokens,
                timestep=t,
                guidance=guidance,
                pooled_projections=prompt["pooled_prompt_embeds"],
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(embeds.shape[1], 3, device=embeds.device),
                img_ids=image_ids,
                return_dict=False,
            )[0]
        return unpack(predicted[:, :count], height, width)

    def cut_last_block(self, transformer: Any) -> None:
        block = transformer.single_transformer_blocks[-1]
        block.forward = LastBlock(block, flux_last_block)

    # Prediction

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        arguments = super().call_arguments(width, height) | {"max_sequence_length": self.max_sequence_length}
        if self.condition_images.most != 0:  # Kontext's own sizes are all of one megapixel
            arguments |= {"max_area": width * height, "_auto_resize": False}
        return arguments

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.flux.pipeline import LatentKontextPipeline

        return LatentKontextPipeline


def position_ids(latents: Tensor, image: int) -> Tensor:
    """(B, C, 2H, 2W) -> (H*W, 3): the number of the image (0 the target, 1, 2, ... its controls), row, column."""
    height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
    sides = (torch.arange(side, device=latents.device, dtype=torch.float32) for side in (height, width))
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).reshape(-1, 3)


class FluxDev(FluxKontext):
    """FLUX.1 [dev]: Kontext's transformer without condition images."""

    pipeline_name = "FluxPipeline"
    condition_images = ConditionImages(most=0)
