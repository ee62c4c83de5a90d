"""What a model family implements; everything else is shared."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from datamodules.batch import LatentBatch
from datamodules.errors import UserError
from datamodules.images.windows import ConditionImages
from lightning_modules.flow import dynamic_shift
from lightning_modules.layers import Layers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class Sampling:
    """How an image is sampled, in training and in prediction; names and meanings are those of diffusers.

    Attributes:
        transformer_name_or_path: the transformer to sample with; None for the model's own.
        shift, shift_terminal: of the scheduler, instead of its own shift; None for what its repository sets.
    """

    num_inference_steps: int
    guidance_scale: float | None
    true_cfg_scale: float | None
    negative_prompt: str | None
    transformer_name_or_path: str | None = None
    shift: float | None = None
    shift_terminal: float | None = None

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """The settings of FlowMatchEulerDiscreteScheduler that differ from its repository's."""
        fixed = {"shift": self.shift, "shift_terminal": self.shift_terminal, "use_dynamic_shifting": False}
        return {} if self.shift is None else fixed

    def scheduler(self, own: Any) -> Any:
        """Return a scheduler with the repository's configuration and these settings."""
        return type(own).from_config(own.config, **self.scheduler_config)


def dynamic_mu(config: Mapping[str, Any], tokens: int, num_inference_steps: int) -> float:
    """What most pipelines shift their timesteps by; arguments as of `SamplingRules.mu`."""
    return math.log(dynamic_shift(tokens, config))


class SamplingRules(NamedTuple):
    """How a pipeline samples.

    Attributes:
        cfg_scale: its argument by which it guides away from a negative prompt; None where it cannot.
        cfg_above: it does so where that argument is larger.
        any_negative: whether it takes a negative prompt; else it guides away from the empty one.
        mu: the schedulers' `mu`, by the scheduler's config, the target's tokens and the number of steps.
    """

    cfg_scale: str | None = "true_cfg_scale"
    cfg_above: float = 1.0
    any_negative: bool = True
    mu: Callable[[Mapping[str, Any], int, int], float] = dynamic_mu

    def negative_prompt(self, sampling: Sampling) -> str | None:
        """The prompt that these settings guide away from; None where they do not."""
        scale = None if self.cfg_scale is None else getattr(sampling, self.cfg_scale)
        return None if scale is None or scale <= self.cfg_above else sampling.negative_prompt or ""

    def scales(self, sampling: Sampling) -> dict[str, float]:
        """The pipeline's arguments that say how much it guides."""
        scales = {"guidance_scale": sampling.guidance_scale}
        if self.cfg_scale == "guidance_scale" and sampling.guidance_scale is None:
            scales["guidance_scale"] = self.cfg_above  # the pipelines' own default would guide
        if self.cfg_scale == "true_cfg_scale":
            scales["true_cfg_scale"] = sampling.true_cfg_scale
        return {name: scale for name, scale in scales.items() if scale is not None}

    def check(self, sampling: Sampling, pipeline_name: str) -> None:
        """Raise a UserError for settings that the pipeline would not follow."""
        if self.cfg_scale != "true_cfg_scale" and (sampling.true_cfg_scale or 1.0) != 1.0:
            instead = "" if self.cfg_scale is None else f": use {self.cfg_scale}"
            raise UserError(f"true_cfg_scale={sampling.true_cfg_scale:g}: {pipeline_name} has none{instead}")
        if sampling.negative_prompt and (self.cfg_scale is None or not self.any_negative):
            what = "none" if self.cfg_scale is None else "the empty one alone"
            raise UserError(f"negative_prompt: {pipeline_name} takes {what}: leave it out")
        if sampling.shift is None and sampling.shift_terminal is not None:
            raise UserError(
                f"shift_terminal={sampling.shift_terminal:g}: without shift, the repository's scheduler sets both. Set "
                "shift as well."
            )

    def without_effect(self, sampling: Sampling, takes_guidance: bool) -> Iterator[str]:
        """Yield a line about each setting that changes nothing, by whether the transformer follows guidance_scale."""
        if sampling.negative_prompt and self.negative_prompt(sampling) is None:
            yield f"negative_prompt has no effect without {self.cfg_scale} above {self.cfg_above:g}"
        least = self.cfg_above if self.cfg_scale == "guidance_scale" else 0
        if not takes_guidance and (sampling.guidance_scale or 0) > least:
            yield f"guidance_scale={sampling.guidance_scale:g} has no effect: this transformer does not follow it"


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
        packed: whether the transformer takes tokens; else latents, of which it makes tokens itself.
        text: the prompt tensor, (B, L, ...), that has as many rows as there are text tokens.
        side_multiple: of which both sides of a picture are multiples, where they can be chosen.
        preferred_sizes: (width, height) that the family's pipeline resizes a picture to; empty if it takes any.
        resolution: side of a square picture.
    """

    patch: int = 2
    packed: bool = True
    text: str = "prompt_embeds"
    side_multiple: int = 16
    preferred_sizes: tuple[tuple[int, int], ...] = ()
    resolution: int = 1024

    def channels(self, config: Mapping[str, Any]) -> int:
        """Of a latent, by the transformer's config."""
        return config["in_channels"] // (self.patch**2 if self.packed else 1)

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
        layers: which of the transformer's layers LoRA adapts, and how other programs name them.
        sampling_rules: how its pipeline samples.
        transformer: once it is loaded.
    """

    pipeline_name: ClassVar[str]
    transformer_class: ClassVar[str]
    text_components: ClassVar[tuple[str, ...]]
    condition_images = ConditionImages()
    geometry = Geometry()
    layers: ClassVar[Layers] = Layers()
    sampling_rules: ClassVar[SamplingRules] = SamplingRules()
    transformer: Any

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
