"""What a model family implements; everything else is shared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.images.conditions import ConditionImages
from lightning_modules.native_names import NO_NATIVE_NAMES, NativeNames

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


class TokenCounts(NamedTuple):
    """How many tokens a sample has of each kind."""

    text: int
    target: int
    controls: int


@dataclass(frozen=True)
class Geometry:
    """How latents and prompts become a transformer's tokens.

    Attributes:
        patch: numbers of a latent that one token has of each channel, each way.
        text: the prompt tensor, (B, L, ...), that has as many rows as there are text tokens.
        side_multiple: of which both sides of a picture are multiples, where they can be chosen.
        preferred_sizes: (width, height) that the family's pipeline resizes a picture to; empty if it takes any.
        resolution: side of a square picture.
    """

    patch: int = 2
    text: str = "prompt_embeds"
    side_multiple: int = 16
    preferred_sizes: tuple[tuple[int, int], ...] = ()
    resolution: int = 1024

    def channels(self, config: Mapping[str, Any]) -> int:
        """Of a latent, by the transformer's config."""
        return config["in_channels"] // self.patch**2

    def image_tokens(self, size: Sequence[int]) -> int:
        """Of a latent whose last two sides are height and width."""
        return size[-2] * size[-1] // self.patch**2

    def tokens(self, batch: LatentBatch) -> TokenCounts:
        """Of a sample."""
        assert batch.target_mean is not None
        target, *controls = (self.image_tokens(image.shape) for image in (batch.target_mean, *batch.controls))
        return TokenCounts(batch.prompt[self.text].shape[1], target, sum(controls))

    def token_count(self, batch: LatentBatch) -> int:
        """All that the transformer sees of a batch."""
        return sum(self.tokens(batch)) * len(batch.keys)


class Parts(Protocol):
    """The loaded components of a pipeline beside its transformer."""

    dtype: torch.dtype

    def __getitem__(self, name: str) -> Any:
        """A component, on its device."""

    def device(self, name: str) -> torch.device:
        """Where a component is."""


class Family(ABC):
    """A pipeline's own part of encoding, denoising and decoding; each method gets what it works on.

    Attributes:
        pipeline_name: the diffusers pipeline that its repositories name.
        transformer_class: the name of its class in diffusers.
        text_components: the repository's components that only text encoding needs.
        condition_images: how many it takes, and at what sizes.
        geometry: how latents and prompts become tokens.
        native_names: of the transformer's layers, in other programs' LoRA files.
    """

    pipeline_name: ClassVar[str]
    transformer_class: ClassVar[str]
    text_components: ClassVar[tuple[str, ...]]
    condition_images = ConditionImages()
    geometry = Geometry()
    native_names: ClassVar[NativeNames] = NO_NATIVE_NAMES

    @abstractmethod
    def encoding_settings(self) -> dict[str, Any]:
        """All settings of the family that the outputs of its encoders depend on."""

    @abstractmethod
    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """The text conditioning by diffusers' argument names, each (...) without a batch; `images` in 8 bits.

        Sequence tensors are (L, ...); NAME_mask is (L,), ones for tokens that count.
        """

    def encode_prompts(self, parts: Parts, prompts: list[str]) -> dict[str, Tensor]:
        """Several at once, each (B, ...), for text encoders that train; not for those that see images."""
        raise NotImplementedError

    @abstractmethod
    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        """The shapes that `encode_prompt` gives, masks left out: as far as can be said without a tokenizer.

        Memory is estimated by them.

        Args:
            config: the transformer's.
            images: (width, height) at which the autoencoder sees the condition images.
        """

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int] | None:
        """How many tokens each prompt has, and how many the text encoder reads; None where it reads them all.

        Asks for tokenizers alone, which have no weights.
        """
        return None

    @abstractmethod
    def encode_pixels(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) in [-1, 1], in the autoencoder's dtype -> mean and std (B, C, h, w), before shift and scale."""

    @abstractmethod
    def normalize(self, latents: Tensor) -> Tensor:
        """The autoencoder's latents -> what the transformer sees (shift and scale)."""

    @abstractmethod
    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        """The transformer's prediction (B, C, h, w) at t (B,) in [0, 1]; controls are normalized latents."""

    def trim_last_block(self, transformer: Any) -> None:
        """Leave out of the transformer's last block what `velocity` does not read, where that can be."""
        return

    @abstractmethod
    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Normalized latents (B, C, h, w) on the autoencoder's device -> pixels (B, 3, H, W), about [-1, 1]."""

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        """What to call the stock pipeline with, beside prompt and sampling, for the picture that predict.py makes."""
        return {"height": height, "width": width}

    @abstractmethod
    def pipeline_class(self) -> "type[DiffusionPipeline]":
        """Its diffusers pipeline, with a method `edit(controls, size, **arguments)` that takes and gives latents.

        Imported here and not before: its module imports the classes of the encoders, which training on cached latents
        does without.
        """
