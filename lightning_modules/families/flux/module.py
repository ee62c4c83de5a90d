"""FLUX.1 dev and Kontext: an MMDiT over text, target and control tokens (arXiv 2506.15742)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from datamodules.images.windows import ConditionImages
from lightning_modules.edit_module import EditModule
from lightning_modules.families.flux.denoise import flux_velocity
from lightning_modules.families.flux.native_names import NATIVE_NAMES
from lightning_modules.families.flux.pipeline import LatentKontext
from lightning_modules.families.patches import LatentPipeline
from lightning_modules.family import ATTENTION, MLPS, TEXT_ATTENTION, Layers, Parts


class FluxKontext(EditModule):
    """FLUX.1 Kontext [dev]: any number of condition images, each of its own size; none in prediction works as well.

    `max_sequence_length` counts T5's tokens, whose padding is not masked.
    """

    pipeline_name = "FluxKontextPipeline"
    transformer_class = "FluxTransformer2DModel"
    text_components = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
    # As diffusers' script for Kontext: both streams and their MLPs, 57 % of the weights.
    layers = Layers(NATIVE_NAMES, (*ATTENTION, *TEXT_ATTENTION, *MLPS, "proj_mlp"))
    latent_pipeline: type = LatentKontext
    stock_images = 1

    # Text

    def encode_prompts(self, parts: Parts, prompts: list[str]) -> dict[str, Tensor]:
        """Return prompt_embeds (B, L, D), T5's last hidden states, and pooled_prompt_embeds (B, P) of CLIP."""
        length = parts["tokenizer"].model_max_length
        t5 = _encode(parts, "_2", prompts, self.max_sequence_length).last_hidden_state
        clip = _encode(parts, "", prompts, length).pooler_output
        return {"prompt_embeds": t5.to(parts.dtype), "pooled_prompt_embeds": clip.to(parts.dtype)}

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        pooled = {"pooled_prompt_embeds": (config["pooled_projection_dim"],)}
        return super().prompt_shapes(config, prompt, images) | pooled

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        """Count T5's tokens; CLIP's vector is of the first 77."""
        return [len(ids) for ids in parts["tokenizer_2"](prompts).input_ids], self.max_sequence_length

    # The transformer

    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        return flux_velocity(transformer, x_t, t, controls, prompt, self.training_guidance_scale)

    # Prediction

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        arguments = super().call_arguments(width, height)
        if self.condition_images.most != 0:  # Kontext's own sizes are all of one megapixel
            arguments |= {"max_area": width * height, "_auto_resize": False}
        return arguments


class FluxDev(FluxKontext):
    """FLUX.1 [dev]: Kontext's transformer without condition images."""

    pipeline_name = "FluxPipeline"
    latent_pipeline = LatentPipeline
    condition_images = ConditionImages(most=0)


def _encode(parts: Parts, suffix: str, prompts: list[str], length: int) -> Any:
    """Return the output of the text encoder of this suffix."""
    tokens = parts[f"tokenizer{suffix}"](
        prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    return parts[f"text_encoder{suffix}"](tokens.input_ids.to(parts.device(f"text_encoder{suffix}")))
