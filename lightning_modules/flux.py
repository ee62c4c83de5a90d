"""FLUX.1 Kontext: an MMDiT over text, target and control tokens (arXiv 2506.15742)."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor

from datamodules.batch import LatentBatch
from lightning_modules.base import EditModule
from lightning_modules.family import Sampling
from lightning_modules.flow import dynamic_shift
from lightning_modules.loading import load_component, vae_config

log = logging.getLogger("retouch")


def pack(latents: Tensor) -> Tensor:
    """(B, C, 2H, 2W) -> (B, H*W, 4C), each token one 2x2 patch."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """(B, H*W, 4C) -> (B, C, 2H, 2W), where `height` = 2H and `width` = 2W are the latent's sides."""
    batch, _, channels = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels // 4, height, width)


def position_ids(latents: Tensor, image: int) -> Tensor:
    """(B, C, 2H, 2W) -> (H*W, 3): the number of the image (0 the target, 1, 2, ... its controls), row, column."""
    height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack([torch.full_like(rows, image), rows, columns], dim=-1)
    return ids.reshape(-1, 3).to(latents.device, torch.float32)


class LatentKontextPipeline(FluxKontextPipeline):
    """The stock pipeline for controls that are already latents: any number of them, each at its own size."""

    controls: list[Tensor]

    def prepare_latents(self, image: None, batch_size: int, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        latents, _, latent_ids, _ = super().prepare_latents(image, batch_size, *args, **kwargs)
        if not self.controls:
            return latents, None, latent_ids, None
        tokens = torch.cat([pack(control) for control in self.controls], dim=1)
        ids = torch.cat([position_ids(control, k) for k, control in enumerate(self.controls, 1)])
        return latents, tokens.to(latents), latent_ids, ids.to(latent_ids)

    @property
    def _execution_device(self) -> torch.device:
        # The stock answer is the device of whichever component comes first; ours may live on several.
        return self.transformer.device


class FluxKontext(EditModule):
    """FLUX.1 Kontext [dev].

    Args:
        max_sequence_length: T5 tokens; its padding is not masked, so use the same in training and prediction.
        training_guidance_scale: the guidance embedding in training; the distilled model wants 1.
    """

    transformer_class = "FluxTransformer2DModel"
    text_components = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")

    def __init__(self, max_sequence_length: int, training_guidance_scale: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.max_sequence_length = max_sequence_length
        self.training_guidance_scale = training_guidance_scale

    # Text

    def prompt_settings(self) -> dict[str, Any]:
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
            if len(whole) > self.max_sequence_length:
                log.warning(
                    f"note: {len(whole)} tokens are cut to {self.max_sequence_length} (model.max_sequence_length): "
                    f'"{prompt[:60]}..."'
                )
        return encoder(ids.to(self.components.device("text_encoder_2"))).last_hidden_state.to(self.base_dtype)

    def encode_prompt(self, prompts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """prompt_embeds (B, L, D), pooled_prompt_embeds (B, P) and text_ids (L, 3), as the pipeline's own."""
        pooled, embeds = self.get_clip_prompt_embeds(prompts), self.get_t5_prompt_embeds(prompts)
        return embeds, pooled, torch.zeros(embeds.shape[1], 3, device=embeds.device, dtype=embeds.dtype)

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        embeds, pooled, _ = self.encode_prompt(prompts)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    @staticmethod
    def _tokenize(tokenizer: Any, prompts: list[str], length: int) -> Tensor:
        return tokenizer(
            prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids

    # Images

    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        # Asking the model for its device and dtype would walk all of its modules, twice in each step.
        latent = self.components["vae"].encode(pixels.to(self.components.device("vae"), self.base_dtype)).latent_dist
        return latent.mode().to(self.main_device), latent.std.to(self.main_device)

    @cached_property
    def vae_config(self) -> dict[str, Any]:
        """Known without loading the autoencoder: training from cached latents never needs its weights."""
        return vae_config(self.components.repository, self.revision)

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
        height, width = x_t.shape[-2:]
        return unpack(predicted[:, : height * width // 4], height, width)

    def dynamic_shift(self, shape: torch.Size) -> float:
        _, height, width = shape
        config = self.components["scheduler"].config
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        return dynamic_shift(height * width // 4, **{name: config[name] for name in names if name in config})

    def token_count(self, batch: LatentBatch) -> int:
        images = [image for image in (batch.target_mean, *batch.controls) if image is not None]
        tokens = batch.prompt["prompt_embeds"].shape[1] + sum(image[0, 0].numel() // 4 for image in images)
        return tokens * len(batch.keys)

    # Prediction

    def pipeline(self) -> LatentKontextPipeline:
        if self._pipeline is None:
            self._pipeline = LatentKontextPipeline(
                scheduler=load_component(self.components.repository, "scheduler", revision=self.revision),
                vae=self.components["vae"],
                text_encoder=None,
                tokenizer=None,
                text_encoder_2=None,
                tokenizer_2=None,
                transformer=self.transformer,
            )
            self._pipeline.set_progress_bar_config(disable=True)
        return self._pipeline

    def denoise(
        self,
        controls: list[Tensor],
        prompt: Mapping[str, Tensor],
        negative: Mapping[str, Tensor] | None,
        size: tuple[int, int],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Tensor:
        width, height = size
        pipeline = self.pipeline()
        pipeline.controls = controls
        latents = pipeline(
            image=None,
            **prompt,
            **{f"negative_{name}": tensor for name, tensor in (negative or {}).items()},
            true_cfg_scale=sampling.true_cfg_scale,
            height=height,
            width=width,
            max_area=height * width,
            num_inference_steps=sampling.num_inference_steps,
            guidance_scale=sampling.guidance_scale,
            generator=generator,
            output_type="latent",
        ).images
        scale = pipeline.vae_scale_factor
        return unpack(latents, height // scale, width // scale)
