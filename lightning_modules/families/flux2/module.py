"""FLUX.2 klein and dev: an MMDiT over text, target and reference tokens, its text from one language model's layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datamodules.images.windows import ConditionImages
from lightning_modules.edit_module import EditModule
from lightning_modules.families.flux.native_names import NORMS
from lightning_modules.families.flux2.denoise import empirical_mu, flux2_velocity
from lightning_modules.families.flux2.pipeline import LatentKlein, LatentReferences
from lightning_modules.family import Layers, Parts, SamplingRules, chat_tokens, stock_pipeline
from lightning_modules.lora_files.names import NativeNames

# The double blocks' attention, and both layers of a single block, which are its attention and its MLP in one.
TARGETS = ("to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj", "to_out")

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"

# Black Forest Labs' own names, by which ComfyUI and others know the layers.
NATIVE_NAMES = NativeNames(
    layers={
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
        "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
        "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        "double_blocks.{}.img_attn.qkv": tuple(f"{DOUBLE}.attn.to_{name}" for name in "qkv"),
        "double_blocks.{}.txt_attn.qkv": tuple(f"{DOUBLE}.attn.add_{name}_proj" for name in "qkv"),
        "double_blocks.{}.img_attn.proj": (f"{DOUBLE}.attn.to_out.0",),
        "double_blocks.{}.txt_attn.proj": (f"{DOUBLE}.attn.to_add_out",),
        "double_blocks.{}.img_mlp.0": (f"{DOUBLE}.ff.linear_in",),
        "double_blocks.{}.img_mlp.2": (f"{DOUBLE}.ff.linear_out",),
        "double_blocks.{}.txt_mlp.0": (f"{DOUBLE}.ff_context.linear_in",),
        "double_blocks.{}.txt_mlp.2": (f"{DOUBLE}.ff_context.linear_out",),
        "single_blocks.{}.linear1": (f"{SINGLE}.attn.to_qkv_mlp_proj",),
        "single_blocks.{}.linear2": (f"{SINGLE}.attn.to_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        "final_layer.linear": ("proj_out",),
    },
    # There shift and scale, in diffusers scale and shift.
    swapped=("norm_out.linear",),
    readers="flux2",
    tensors=NORMS,
)


class Flux2Latents(EditModule):
    """Latents of FLUX.2's autoencoder, normalized by statistics in its weights."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._statistics: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def _statistics_on(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return `_mean_and_std` of the autoencoder's batch norm, on the latents' device."""
        key = latents.device, latents.dtype
        if key not in self._statistics:
            mean, variance = (self.base.vae_tensor(f"bn.running_{name}") for name in ("mean", "var"))
            self._statistics[key] = _mean_and_std(mean, variance, self.base.vae_config["batch_norm_eps"], latents)
        return self._statistics[key]

    def normalize(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics_on(latents)
        return ((_patches(latents) - mean) / std).reshape(latents.shape)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        latents = latents.to(vae.dtype)
        mean, std = _mean_and_std(vae.bn.running_mean, vae.bn.running_var, vae.config.batch_norm_eps, latents)
        return vae.decode((_patches(latents) * std + mean).reshape(latents.shape)).sample


class Flux2Klein(Flux2Latents):
    """FLUX.2 [klein]: any number of condition images, each of its own size; none in prediction works as well.

    Padding of the text is not masked.
    """

    pipeline_name = "Flux2KleinPipeline"
    transformer_class = "Flux2Transformer2DModel"
    text_components = ("tokenizer", "text_encoder")
    condition_images = ConditionImages(most_area=1024 * 1024, crops=True)
    layers = Layers(NATIVE_NAMES, TARGETS)
    sampling_rules = SamplingRules("guidance_scale", any_negative=False, mu=empirical_mu)
    latent_pipeline: type = LatentKlein
    _prompt_function = "_get_qwen3_prompt_embeds"  # of the pipeline

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return prompt_embeds (max_sequence_length, 3D), the outputs of three layers; padding counts."""
        embed = getattr(stock_pipeline(self.pipeline_name), self._prompt_function)
        # The language model without its head, whose logits are not needed.
        used = parts["text_encoder"].model, parts["tokenizer"], prompt, parts.dtype, parts.device("text_encoder")
        return {"prompt_embeds": embed(*used, self.max_sequence_length)[0]}

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        return chat_tokens(parts["tokenizer"], prompts, False), self.max_sequence_length

    # The transformer

    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        return flux2_velocity(transformer, x_t, t, controls, prompt, self.training_guidance_scale)


class Flux2Dev(Flux2Klein):
    """FLUX.2 [dev]: Mistral reads the prompt, and guidance is embedded."""

    pipeline_name = "Flux2Pipeline"
    sampling_rules = SamplingRules(None, mu=empirical_mu)
    latent_pipeline = LatentReferences
    _prompt_function = "_get_mistral_3_small_prompt_embeds"

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        template = parts["tokenizer"].apply_chat_template
        tokens = [template(format_input([prompt]), tokenize=True, return_dict=True) for prompt in prompts]
        return [len(one["input_ids"][0]) for one in tokens], self.max_sequence_length


def _patches(latents: Tensor) -> Tensor:
    """(B, C, 2H, 2W) -> (B, C, H, 2, W, 2)."""
    return latents.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2))


def _mean_and_std(mean: Tensor, variance: Tensor, eps: float, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and std of each channel's four values in a token, each (C, 1, 2, 1, 2), in the latents' dtype."""
    mean, variance = (one.to(latents).view(-1, 1, 2, 1, 2) for one in (mean, variance))
    return mean, torch.sqrt(variance + eps)
