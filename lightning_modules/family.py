"""What a model family implements; everything else is shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from datamodules.batch import LatentBatch


@dataclass(frozen=True)
class Sampling:
    """How a picture is made; names and meanings are those of the diffusers pipelines."""

    num_inference_steps: int
    guidance_scale: float
    true_cfg_scale: float = 1.0  # the pipelines' own default: none
    negative_prompt: str = ""

    @property
    def uses_negative(self) -> bool:
        return self.true_cfg_scale > 1


class Family(ABC):
    """A pipeline's own part of encoding, denoising and decoding.

    `transformer_class` is the name of its class in diffusers; `text_components` are the repository's components
    that only text encoding needs; `prompts_see_images` says that a prompt's conditioning depends on the condition
    images too.
    """

    transformer_class: ClassVar[str]
    text_components: ClassVar[tuple[str, ...]]
    prompts_see_images: ClassVar[bool] = False

    @abstractmethod
    def prompt_settings(self) -> dict[str, Any]:
        """All settings that the output of `encode_prompts` depends on."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """The text conditioning by diffusers' argument names, each (B, ...), on the text encoders' device."""

    @abstractmethod
    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) in [-1, 1] -> mean and std (B, C, h, w) of the latent, before shift and scale."""

    @abstractmethod
    def normalize(self, latents: Tensor) -> Tensor:
        """The autoencoder's latents -> what the transformer sees (shift and scale)."""

    @abstractmethod
    def velocity(self, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]) -> Tensor:
        """The transformer's prediction (B, C, h, w) at t (B,) in [0, 1]; controls are normalized latents."""

    @abstractmethod
    def denoise(
        self,
        controls: list[Tensor],
        prompt: Mapping[str, Tensor],
        negative: Mapping[str, Tensor] | None,
        size: tuple[int, int],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Tensor:
        """One picture of `size` (width, height) by the family's pipeline: normalized latents (1, C, h, w)."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Normalized latents (B, C, h, w) -> pixels (B, 3, H, W), about [-1, 1], on the CPU in float32."""

    @abstractmethod
    def pipeline(self) -> Any:
        """The family's diffusers pipeline around the transformer that is loaded."""

    @abstractmethod
    def dynamic_shift(self, shape: torch.Size) -> float:
        """The pipeline's timestep shift for a latent of shape (C, h, w)."""

    @abstractmethod
    def token_count(self, batch: LatentBatch) -> int:
        """Tokens that the transformer sees for the batch: text, target and controls."""
