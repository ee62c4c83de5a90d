"""Qwen-Image-2.1: one block-causal stream of text and images, which have alpha (Qwen-Image's text and latents)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from datamodules.batch import Geometry
from datamodules.images.windows import SeenByBoth
from foundation.errors import UserError
from lightning_modules.families.qwen_image.module import QwenLatents
from lightning_modules.families.qwen_image_2_1.denoise import qwen21_velocity
from lightning_modules.families.qwen_image_2_1.pipeline import LatentSequence
from lightning_modules.family import ATTENTION, Layers, Parts, Sampling, SamplingRules, text_pipeline
from lightning_modules.lora_files.names import NativeNames

# Side in pixels of the square for which the text encoder has one token.
SLOT = 32
MLP = "transformer_blocks.{}.img_mlp"


class WithoutHead:
    """The language model as the pipeline calls it, without computing logits."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)


class QwenImage21(QwenLatents):
    """Qwen-Image-2.1: up to ten condition images, which the text encoder sees as well, or none.

    Padding of the text is not masked, since it would move the images' positions.

    Args:
        output_resolution: as in the pipeline, the side of the square whose area condition images are resized to.
        settings: arguments of `EditModule`.
    """

    pipeline_name = "QwenImage21Pipeline"
    transformer_class = "QwenImage21Transformer2DModel"
    text_components: ClassVar[tuple[str, ...]] = ("processor", "text_encoder")
    geometry = Geometry(patch=1, equal_text=True, side_multiple=SLOT, result_multiple=SLOT)
    # Attention and MLPs, as miles_diffusion and its pull request 256. The others have a row for t = 0 as well.
    layers = Layers(
        # As joined in ComfyUI.
        NativeNames(read_only={f"{MLP}.gate_up": (f"{MLP}.gate_layer", f"{MLP}.proj")}, readers="qwen21"),
        (*ATTENTION, "img_mlp.proj", "img_mlp.out", "img_mlp.gate_layer"),
        flattened=("time_text_embed.*", "modulation.*", "norm_out.*"),
    )
    sampling_rules = SamplingRules(guidance_scale=False)
    latent_pipeline = LatentSequence

    def __init__(self, output_resolution: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.output_resolution = output_resolution
        self.condition_images = SeenByBoth(most=10, vae_image_size=output_resolution**2, alpha=True)

    def encoding_settings(self) -> dict[str, Any]:
        return {"output_resolution": self.output_resolution}

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return prompt_embeds (L, D) and image_pad_mask (L,), True for the tokens of images."""
        pipeline = text_pipeline(self.pipeline_name, parts, ["processor"])
        pipeline.text_encoder = WithoutHead(parts["text_encoder"].base_model)
        seen = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        [embeds], _, [slots] = pipeline._get_qwen_prompt_embeds(prompt, seen or None, parts.device("text_encoder"))
        if slots.sum() != sum(image.width * image.height for image in seen) // SLOT**2:
            sizes = ", ".join(f"{image.width}x{image.height}" for image in seen)
            raise UserError(
                f"condition images of {sizes} are outside the limits of {self.base.name}'s text encoder, which would "
                "resize them: change data.resolution or model.output_resolution"
            )
        return {"prompt_embeds": embeds.to(parts.dtype), "image_pad_mask": slots}

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (self.text_length(prompt, images), config["context_in_dim"])}

    def text_length(self, prompt: str, images: list[tuple[int, int]]) -> int:
        """Return the length of the text and, for images, one token for 32x32 pixels, with a few words between them."""
        return 8 + len(prompt) // 4 + sum(6 + width * height // SLOT**2 for width, height in images)

    # Images

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        latents = latents.to(vae.dtype)
        latents = latents * self._statistic("latents_std", latents) + self._statistic("latents_mean", latents)
        return vae.decode(latents.unsqueeze(2)).sample.squeeze(2)

    # The transformer

    velocity = staticmethod(qwen21_velocity)

    # Prediction

    def sampling_arguments(self, sampling: Sampling, index: Mapping[str, Any]) -> dict[str, Any]:
        # The pipeline would always use its own steps; here only if num_inference_steps is their number.
        own = index.get("sample_sigmas") or []
        sigmas = {"sigmas": own} if len(own) == sampling.num_inference_steps else {}
        # The cache holds the first step's keys and values of text and images, but a T-LoRA changes with the steps.
        return {"use_kv_cache": not self.rank_gates, **sigmas}

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        uncached = {"use_kv_cache": False} if self.rank_gates else {}
        return {"height": height, "width": width, "output_resolution": self.output_resolution, **uncached}
