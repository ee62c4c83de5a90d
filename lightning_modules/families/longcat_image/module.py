"""LongCat-Image-Edit: a 6B MMDiT conditioned by a vision-language model (arXiv 2512.07584)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from datamodules.errors import UserError
from lightning_modules.families.flux.denoise import trim_last_block
from lightning_modules.families.kl_autoencoder import KLAutoencoder
from lightning_modules.families.longcat_image import denoise
from lightning_modules.families.longcat_image.conditions import HalvedForText, halved
from lightning_modules.families.longcat_image.native_names import NATIVE_NAMES
from lightning_modules.families.longcat_image.prompt import MAX_TOKENS, embed, tokenize
from lightning_modules.family import Parts, SamplingRules
from lightning_modules.layers import ATTENTION, MLPS, TEXT_ATTENTION, Layers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class LongCatImageEdit(KLAutoencoder):
    """LongCat-Image-Edit: one condition image, which the text encoder sees too.

    Args:
        vae_image_size: pixels that the condition image is resized to for the autoencoder, in its own proportions; the
            text encoder sees that at half its sides.
        settings: of `EditModule`.
    """

    pipeline_name = "LongCatImageEditPipeline"
    transformer_class = "LongCatImageTransformer2DModel"
    text_components = ("tokenizer", "text_processor", "text_encoder")
    # As the authors' train_edit_lora.py: both streams and their MLPs, 45 % of the weights.
    layers = Layers(NATIVE_NAMES, (*ATTENTION, *TEXT_ATTENTION, *MLPS))
    sampling_rules = SamplingRules("guidance_scale", 1.0)

    def __init__(self, vae_image_size: int, **settings: Any) -> None:
        super().__init__(**settings)
        if vae_image_size is None:
            raise UserError("model.vae_image_size=null: LongCat resizes every condition image, to a number of pixels")
        self.condition_images = HalvedForText(most=1, least=1, vae_image_size=vae_image_size)

    def encoding_settings(self) -> dict[str, Any]:
        return {"vae_image_size": self.condition_images.vae_image_size}

    def pipeline_class(self) -> "type[DiffusionPipeline]":
        from lightning_modules.families.longcat_image.pipeline import LatentEditPipeline

        return LatentEditPipeline

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """prompt_embeds (L, D): of the image, and of 512 tokens of text, whose padding is not masked."""
        # The language model without its head, whose logits nobody needs.
        used = {name: parts[name] for name in self.text_components} | {"text_encoder": parts["text_encoder"].model}
        pipeline = self.pipeline_class()(**used, **dict.fromkeys(("scheduler", "vae", "transformer")))
        tokens = tokenize(parts["tokenizer"], prompt)
        return {"prompt_embeds": embed(pipeline, tokens, images, parts.device("text_encoder")).to(parts.dtype)}

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        return [len(tokenize(parts["tokenizer"], prompt)) for prompt in prompts], MAX_TOKENS

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        """The text, and of the image one token for 28x28 pixels between two others."""
        width, height = halved(*images[0])
        length = 2 + round(width / 28) * round(height / 28) + MAX_TOKENS
        return {"prompt_embeds": (length, config["joint_attention_dim"])}

    # The transformer

    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        return denoise.velocity(transformer, x_t, t, controls, prompt)

    def trim_last_block(self, transformer: Any) -> None:
        trim_last_block(transformer)  # its single blocks are FLUX.1's, but for their names

    # Prediction

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        return {}  # the stock pipeline makes a picture of about a megapixel, in the proportions of the image
