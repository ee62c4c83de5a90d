"""What a model family implements; everything else is shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from datamodules.images.conditions import ConditionImages
from lightning_modules.adapters.formats.diffusers import PREFIXES

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Sampling:
    """How a picture is made; names and meanings are those of the diffusers pipelines."""

    num_inference_steps: int
    guidance_scale: float | None
    true_cfg_scale: float
    negative_prompt: str | None

    @property
    def negative(self) -> str | None:
        """The prompt of true CFG's other half; None where there is none."""
        return (self.negative_prompt or "") if self.true_cfg_scale > 1 else None


class Family(ABC):
    """A pipeline's own part of encoding, denoising and decoding.

    Attributes:
        pipeline_name: the diffusers pipeline that its repositories name.
        transformer_class: the name of its class in diffusers.
        text_components: the repository's components that only text encoding needs.
        condition_images: how many it takes, and at what sizes.
        lora_prefix: stands before the names of layers in LoRA files; one of `lora_files.PREFIXES`.
    """

    pipeline_name: ClassVar[str]
    transformer_class: ClassVar[str]
    text_components: ClassVar[tuple[str, ...]]
    condition_images = ConditionImages()
    lora_prefix: ClassVar[str] = PREFIXES[0]

    @abstractmethod
    def encoding_settings(self) -> dict[str, Any]:
        """All settings of the family that the outputs of its encoders depend on."""

    @abstractmethod
    def encode_prompt(self, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """The text conditioning by diffusers' argument names, each (...) without a batch; `images` in 8 bits.

        What is as long as the text has its length first, and a mask of ones of that length beside it.
        """

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Several at once, each (B, ...), for text encoders that train; not for those that see images."""
        raise NotImplementedError

    @abstractmethod
    def prompt_shapes(self, prompt: str, images: list[tuple[int, int]]) -> dict[str, tuple[int, ...]]:
        """The shapes that `encode_prompt` gives, masks left out, for condition images whose autoencoder sees these
        (width, height): as far as can be said without a tokenizer. Memory is estimated by them.
        """

    @abstractmethod
    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) in [-1, 1] -> mean and std (B, C, h, w) of the latent, before shift and scale."""

    @abstractmethod
    def normalize(self, latents: Tensor) -> Tensor:
        """The autoencoder's latents -> what the transformer sees (shift and scale)."""

    @abstractmethod
    def velocity(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        """The transformer's prediction (B, C, h, w) at t (B,) in [0, 1]; controls are normalized latents."""

    def cut_last_block(self, transformer: Any) -> None:
        """Leave out of the transformer's last block what `velocity` does not read (`last_block`), where it can be."""
        return

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Normalized latents (B, C, h, w) -> pixels (B, 3, H, W), about [-1, 1], on the CPU in float32."""

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        """What to call the stock pipeline with, beside prompt and sampling, for the picture that predict.py makes."""
        return {"height": height, "width": width}

    @abstractmethod
    def pipeline_class(self) -> "type[DiffusionPipeline]":
        """Its diffusers pipeline, with a method `edit(controls, size, **arguments)` that takes and gives latents.

        Imported here and not before: its module imports the classes of the encoders, which training on cached latents
        does without.
        """
