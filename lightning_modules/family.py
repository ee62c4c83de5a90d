"""The interface of a model family; everything else is shared."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from datamodules.batch import Geometry
from datamodules.images.windows import ConditionImages
from foundation.errors import UserError
from lightning_modules.flow import dynamic_shift
from lightning_modules.lora_files.names import NO_NATIVE_NAMES, NativeNames

# Linear layers of several families' transformers.
ATTENTION = ("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0")
TEXT_ATTENTION = ("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out")
# The MLPs of FLUX.1's double blocks, of the image's tokens and of the text's.
MLPS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, in training and in prediction; names and meanings are those of diffusers.

    Attributes:
        transformer_name_or_path: the transformer to sample with; None for the model's own.
        shift, shift_terminal: settings of the scheduler in place of its own shift; None for the repository's.
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
    """Return the shift of timesteps in most pipelines; arguments as for `SamplingRules.mu`."""
    return math.log(dynamic_shift(tokens, config))


class SamplingRules(NamedTuple):
    """The guidance and the schedule of a pipeline.

    Attributes:
        cfg_scale: name of its argument for guidance away from a negative prompt; None if it has none.
        cfg_above: guidance is on if that argument is larger than this.
        any_negative: whether it takes a negative prompt; else it guides away from the empty one.
        mu: the scheduler's `mu`, from the scheduler's config, the target's tokens and the number of steps.
        guidance_scale: whether it has an argument of this name.
        guides_distilled: whether it guides distilled transformers as well.
    """

    cfg_scale: str | None = "true_cfg_scale"
    cfg_above: float = 1.0
    any_negative: bool = True
    mu: Callable[[Mapping[str, Any], int, int], float] = dynamic_mu
    guidance_scale: bool = True
    guides_distilled: bool = False

    def negative_prompt(self, sampling: Sampling) -> str | None:
        """Return the prompt to guide away from; None without guidance."""
        scale = None if self.cfg_scale is None else getattr(sampling, self.cfg_scale)
        return None if scale is None or scale <= self.cfg_above else sampling.negative_prompt or ""

    def scales(self, sampling: Sampling) -> dict[str, float]:
        """Return the pipeline's arguments for the strength of guidance."""
        scales = {"guidance_scale": sampling.guidance_scale} if self.guidance_scale else {}
        if self.cfg_scale == "guidance_scale" and sampling.guidance_scale is None:
            scales["guidance_scale"] = self.cfg_above  # the pipelines' own default would guide
        if self.cfg_scale == "true_cfg_scale":
            scales["true_cfg_scale"] = sampling.true_cfg_scale
        return {name: scale for name, scale in scales.items() if scale is not None}

    def check_sampling(self, sampling: Sampling, pipeline_name: str) -> None:
        """Raise a UserError for settings that the pipeline would ignore."""
        if self.cfg_scale != "true_cfg_scale" and (sampling.true_cfg_scale or 1.0) != 1.0:
            instead = "Leave it out" if self.cfg_scale is None else f"Use {self.cfg_scale}"
            raise UserError(
                f"true_cfg_scale={sampling.true_cfg_scale:g}: {pipeline_name} has no such scale. {instead}."
            )
        if sampling.negative_prompt and (self.cfg_scale is None or not self.any_negative):
            taken = "no negative prompt" if self.cfg_scale is None else "only the empty negative prompt"
            raise UserError(f"negative_prompt={sampling.negative_prompt}: {pipeline_name} takes {taken}. Leave it out.")
        if sampling.shift is None and sampling.shift_terminal is not None:
            raise UserError(
                f"shift_terminal={sampling.shift_terminal:g}: without shift, the repository's scheduler sets both. Set "
                "shift as well."
            )

    def without_effect(self, sampling: Sampling, takes_guidance: bool) -> Iterator[str]:
        """Yield a note for each setting that changes nothing, or guides otherwise than it seems.

        Args:
            takes_guidance: whether the transformer follows guidance_scale.
        """
        guides = self.negative_prompt(sampling) is not None
        if sampling.negative_prompt and not guides:
            yield f"negative_prompt has no effect without {self.cfg_scale} above {self.cfg_above:g}"
        if guides and sampling.negative_prompt is None and self.cfg_scale == "true_cfg_scale":
            yield f"true_cfg_scale={sampling.true_cfg_scale:g} guides; diffusers would not without negative_prompt"
        least = self.cfg_above if self.cfg_scale == "guidance_scale" else 0
        if not takes_guidance and (sampling.guidance_scale or 0) > least:
            yield f"guidance_scale={sampling.guidance_scale:g} has no effect: this transformer does not follow it"
        elif sampling.guidance_scale is not None and sampling.guidance_scale < self.cfg_above and takes_guidance:
            yield f"guidance_scale={sampling.guidance_scale:g}: this transformer guides above 1; use 1 for no guidance"


class Layers(NamedTuple):
    """The linear layers of a transformer.

    Attributes:
        native: their names in other programs' LoRA files.
        targets: name endings of the layers that are adapted by default.
        output: pattern of the last projection, which `all-linear` leaves out.
        flattened: patterns of layers that see the tokens of all samples as one row, so that a rank mask cannot address
            single samples; `all-linear` leaves them out.
    """

    native: NativeNames = NO_NATIVE_NAMES
    targets: tuple[str, ...] = ATTENTION
    output: str = "proj_out"
    flattened: tuple[str, ...] = ()


ALIKE = Layers()


class Parts(Protocol):
    """The loaded components of a pipeline, without its transformer."""

    dtype: torch.dtype

    def __getitem__(self, name: str) -> Any:
        """Return a component, on its device."""

    def device(self, name: str) -> torch.device:
        """Return the device of a component."""


def stock_pipeline(name: str) -> Any:
    """Return a pipeline of diffusers, whose import loads the encoders' classes: cached training does not need it."""
    import diffusers

    return getattr(diffusers, name)


def text_pipeline(name: str, parts: Parts, components: Sequence[str]) -> Any:
    """Return a pipeline of diffusers with these components only; its language model computes no logits."""
    used = dict.fromkeys(("scheduler", "vae", "transformer", "text_encoder")) | {one: parts[one] for one in components}
    if used["text_encoder"] is not None:
        used["text_encoder"] = used["text_encoder"].base_model
    return stock_pipeline(name)(**used)


def chat_tokens(tokenizer: Any, prompts: list[str], thinking: bool) -> list[int]:
    """Count the tokens of each prompt as Qwen3's user says it, including those of the template."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    more = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
    return [len(ids) for ids in tokenizer(tokenizer.apply_chat_template(chats, **more)).input_ids]


class Family(ABC):
    """A pipeline's own part of encoding, denoising and decoding.

    Attributes:
        pipeline_name: the diffusers pipeline named in its repositories.
        transformer_class: its class in diffusers.
        text_components: the repository's components for text encoding only.
        refused: settings in a transformer's config that it cannot use, with the reason.
        default_components: class in diffusers and settings of components that its pipeline creates if the repository
            has none.
        condition_images: their number and sizes.
        geometry: sizes of latents and tokens.
        layers: the layers that LoRA adapts, and their names in other programs.
        sampling_rules: guidance and schedule of its pipeline.
        latent_pipeline: mixin of the pipeline, whose `edit(controls, size, **arguments)` is from latents to latents.
        stock_images: how many images its pipeline in diffusers takes; None for as many as the family.
        unread: beginnings of the names of the last block's parameters that only a discarded output depends on.
        max_sequence_length: text tokens of the pipeline's argument of this name; 0 if it has none. If padding is not
            masked, prediction needs the number of training.
        transformer: once it is loaded.
    """

    pipeline_name: ClassVar[str]
    transformer_class: ClassVar[str]
    text_components: ClassVar[tuple[str, ...]]
    refused: ClassVar[Mapping[str, str]] = {}
    default_components: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {}
    condition_images = ConditionImages()
    geometry = Geometry()
    layers: ClassVar[Layers] = Layers()
    sampling_rules: ClassVar[SamplingRules] = SamplingRules()
    latent_pipeline: type
    stock_images: ClassVar[int | None] = None
    unread: ClassVar[tuple[str, ...]] = ()
    max_sequence_length: int = 0
    transformer: Any

    def encoding_settings(self) -> dict[str, Any]:
        """Return the family's settings that the outputs of its encoders depend on."""
        return {"max_sequence_length": self.max_sequence_length} if self.max_sequence_length else {}

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return the text conditioning by diffusers' argument names, without a batch dimension; `images` in 8 bits.

        Sequence tensors are (L, ...); NAME_mask is (L,), ones for tokens that count.
        """
        return {name: tensor[0] for name, tensor in self.encode_prompts(parts, [prompt]).items()}

    def encode_prompts(self, parts: Parts, prompts: list[str]) -> dict[str, Tensor]:
        """Encode several prompts, each tensor (B, ...), with trainable text encoders that see no images."""
        raise NotImplementedError

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `encode_prompt` without masks, for a transformer's config; the length is estimated."""
        return {"prompt_embeds": (self.text_length(prompt, images), config["joint_attention_dim"])}

    def text_length(self, prompt: str, images: list[tuple[int, int]]) -> int:
        """Estimate a prompt's text tokens, without a tokenizer, to plan memory.

        Args:
            images: (width, height) of the condition images for the autoencoder.
        """
        return self.max_sequence_length

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int] | None:
        """Return each prompt's token count and the text encoder's limit; None if it has no limit.

        Only tokenizers are loaded, which have no weights.
        """
        return None

    def encode_pixels(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3 or 4, H, W) in [-1, 1], in the autoencoder's dtype -> mean, std (B, C, h, w) before shift and scale."""
        latent = vae.encode(pixels).latent_dist
        return latent.mode(), latent.std

    @abstractmethod
    def normalize(self, latents: Tensor) -> Tensor:
        """Shift and scale the autoencoder's latents for the transformer."""

    @abstractmethod
    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        """Predict the velocity (B, C, h, w) at t (B,) in [0, 1]; controls are normalized latents."""

    @abstractmethod
    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Normalized latents (B, C, h, w) on the autoencoder's device -> pixels (B, 3 or 4, H, W), about [-1, 1]."""

    def sampling_arguments(self, sampling: Sampling, index: Mapping[str, Any]) -> dict[str, Any]:
        """Return further arguments of the pipeline, whose model_index.json is `index`."""
        return {}

    def call_arguments(self, width: int, height: int) -> dict[str, Any]:
        """Return arguments of the stock pipeline, besides prompt and sampling, for the image that predict.py makes."""
        length = {"max_sequence_length": self.max_sequence_length} if self.max_sequence_length else {}
        return {"height": height, "width": width, **length}

    def pipeline_code(self, repository: str, dtype: str, arguments: dict[str, Any]) -> list[str]:
        """Return lines of Python that load the stock pipeline as `pipe`; they may take over `arguments` of its call."""
        return [f"pipe = {self.pipeline_name}.from_pretrained({repository!r}, dtype={dtype})"]
