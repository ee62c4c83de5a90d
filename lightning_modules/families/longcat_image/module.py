"""LongCat-Image-Edit: a 6B MMDiT conditioned by a vision-language model (arXiv 2512.07584)."""

import math
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from datamodules.images.samples import SIDE_MULTIPLE
from datamodules.images.windows import SeenByBoth, resize
from foundation.errors import UserError
from lightning_modules.edit_module import EditModule
from lightning_modules.families.flux.native_names import NATIVE_NAMES as FLUX_NAMES
from lightning_modules.families.longcat_image.denoise import longcat_velocity
from lightning_modules.families.longcat_image.pipeline import LatentLongCat
from lightning_modules.family import ATTENTION, MLPS, TEXT_ATTENTION, Layers, Parts, SamplingRules, text_pipeline

MAX_TOKENS = 512  # the pipeline's, which fails for longer prompts instead of truncating them

# As in ComfyUI, to which LongCat is one of FLUX.1's.
NATIVE_NAMES = FLUX_NAMES._replace(
    layers={
        **FLUX_NAMES.layers,
        "time_in.in_layer": ("time_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_embed.timestep_embedder.linear_2",),
    },
    readers="longcat",
)


@dataclass(frozen=True)
class HalvedForText(SeenByBoth):
    """The text encoder sees the autoencoder's image at half its width and height."""

    def _of_area(self, width: int, height: int, area: int) -> tuple[int, int]:
        """Return sides that are rounded up to 16."""
        wide = math.sqrt(area * (width / height))
        high = wide / (width / height)  # in the pipeline's order, to round as it does
        return math.ceil(wide / SIDE_MULTIPLE) * SIDE_MULTIPLE, math.ceil(high / SIDE_MULTIPLE) * SIDE_MULTIPLE

    def _seen(self, image: Image.Image) -> Image.Image:
        return resize(image, halved(*image.size))  # resized twice, as in the pipeline


def halved(width: int, height: int) -> tuple[int, int]:
    """Return the size for the text encoder."""
    return width // 2, height // 2


class LongCatImageEdit(EditModule):
    """LongCat-Image-Edit: one condition image, which the text encoder sees as well.

    Args:
        vae_image_size: pixels that the condition image is resized to for the autoencoder, keeping its proportions; the
            text encoder sees that image at half its width and height.
        settings: arguments of `EditModule`.
    """

    pipeline_name = "LongCatImageEditPipeline"
    transformer_class = "LongCatImageTransformer2DModel"
    text_components = ("tokenizer", "text_processor", "text_encoder")
    # As the authors' train_edit_lora.py: both streams and their MLPs, 45 % of the weights.
    layers = Layers(NATIVE_NAMES, (*ATTENTION, *TEXT_ATTENTION, *MLPS))
    sampling_rules = SamplingRules("guidance_scale", 1.0)
    latent_pipeline = LatentLongCat

    def __init__(self, vae_image_size: int, **settings: Any) -> None:
        super().__init__(**settings)
        if vae_image_size is None:
            raise UserError("model.vae_image_size=null: LongCat resizes each condition image. Set a number of pixels.")
        self.condition_images = HalvedForText(most=1, least=1, vae_image_size=vae_image_size)

    def encoding_settings(self) -> dict[str, Any]:
        return {"vae_image_size": self.condition_images.vae_image_size}

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return prompt_embeds (L, D) of the image and of 512 text tokens, whose padding is not masked."""
        while len(_tokenize(parts["tokenizer"], prompt)) > MAX_TOKENS:
            prompt = prompt[:-1]
        pipeline = text_pipeline(self.pipeline_name, parts, self.text_components)
        return {"prompt_embeds": pipeline._encode_prompt([prompt], images)[0].to(parts.dtype)}

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        return [len(_tokenize(parts["tokenizer"], prompt)) for prompt in prompts], MAX_TOKENS

    def text_length(self, prompt: str, images: list[tuple[int, int]]) -> int:
        """Return the length of the text and, for the image, one token for 28x28 pixels, between two others."""
        width, height = halved(*images[0])
        return 2 + round(width / 28) * round(height / 28) + MAX_TOKENS

    # The transformer

    velocity = staticmethod(longcat_velocity)

    # Prediction

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        return {}  # the stock pipeline chooses about a megapixel, in the proportions of the image


def _tokenize(tokenizer: Any, prompt: str) -> list[int]:
    """Return the prompt's tokens; quoted text, to be written in the image, is split into letters."""
    from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import split_quotation

    pieces = [piece for text, quoted in split_quotation(prompt) for piece in (text if quoted else [text])]
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False).input_ids]
