"""Krea 2: a 12.8B single-stream MMDiT over text and image tokens, its text from twelve layers of a language model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datamodules.images.decoding import size_of_area
from datamodules.images.windows import ConditionImages
from foundation.errors import UserError
from lightning_modules.families.krea2.denoise import SCHEMES, krea2_mu, krea2_velocity, references
from lightning_modules.families.krea2.pipeline import LatentKrea2
from lightning_modules.families.qwen_image.module import QwenLatents
from lightning_modules.family import ATTENTION, Layers, Parts, SamplingRules, text_pipeline
from lightning_modules.lora_files.names import NativeNames

# Lists of blocks and their layers, by their names in Krea's own code.
BLOCK_LISTS = {
    "blocks": "transformer_blocks",
    **{f"txtfusion.{name}_blocks": f"text_fusion.{name}_blocks" for name in ("layerwise", "refiner")},
}
BLOCK_LAYERS = {
    **{f"attn.w{name}": f"attn.to_{name}" for name in "qkv"},
    "attn.gate": "attn.to_gate",
    "attn.wo": "attn.to_out.0",
    **{f"mlp.{name}": f"ff.{name}" for name in ("gate", "up", "down")},
}
BLOCK_NORMS = {
    **{f"attn.qknorm.{name}norm.scale": f"attn.norm_{name}.weight" for name in "qk"},
    **{f"{when}norm.scale": f"norm{number}.weight" for when, number in (("pre", 1), ("post", 2))},
}
NATIVE_NAMES = NativeNames(
    layers={
        "first": ("img_in",),
        "tmlp.0": ("time_embed.linear_1",),
        "tmlp.2": ("time_embed.linear_2",),
        "tproj.1": ("time_mod_proj",),
        "txtmlp.1": ("txt_in.linear_1",),
        "txtmlp.3": ("txt_in.linear_2",),
        "txtfusion.projector": ("text_fusion.projector",),
        "last.linear": ("final_layer.linear",),
        **{
            f"{native}.{{}}.{layer}": (f"{name}.{{}}.{own}",)
            for native, name in BLOCK_LISTS.items()
            for layer, own in BLOCK_LAYERS.items()
        },
    },
    readers="krea2",
    flat=r"blocks\.\d+\.mod\.lin",
    tensors={
        "txtmlp.0.scale": "txt_in.norm.weight",
        "last.norm.scale": "final_layer.norm.weight",
        "last.modulation.lin": "final_layer.scale_shift_table",
        "blocks.{}.mod.lin": "transformer_blocks.{}.scale_shift_table",
        **{
            f"{native}.{{}}.{norm}": f"{name}.{{}}.{own}"
            for native, name in BLOCK_LISTS.items()
            for norm, own in BLOCK_NORMS.items()
        },
    },
)
# Settings of Qwen3-VL's processor, which is not in the repository.
PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 256**2, "longest_edge": 4096**2}}


class Krea2(QwenLatents):
    """Krea 2, text to image; by a scheme with any number of references, seen by text encoder and transformer, or none.

    Args:
        edit_scheme: a name in `SCHEMES`; None for text to image only.
        condition_image_size: pixels that references are resized to for the text encoder, keeping their proportions.
        settings: arguments of `EditModule`.
    """

    pipeline_name = "Krea2Pipeline"
    transformer_class = "Krea2Transformer2DModel"
    text_components = ("tokenizer", "text_encoder")
    condition_images = ConditionImages(most=0)
    # As the authors, but for embedders and for blocks in which each token is a row of its own: 96 % of the weights.
    layers = Layers(
        NATIVE_NAMES,
        (*ATTENTION, "attn.to_gate", "ff.gate", "ff.up", "ff.down"),
        output="final_layer.linear",
        flattened=("text_fusion.layerwise_blocks.*", "text_fusion.projector"),
    )
    sampling_rules = SamplingRules("guidance_scale", 0.0, mu=krea2_mu, guides_distilled=True)
    latent_pipeline: type = LatentKrea2
    stock_images = 0

    def __init__(self, edit_scheme: str | None, condition_image_size: int, **settings: Any) -> None:
        super().__init__(**settings)
        if edit_scheme not in (None, *SCHEMES):
            raise UserError(f"model.edit_scheme={edit_scheme}: choose {', '.join(SCHEMES)}, or null for text to image")
        if edit_scheme is not None and condition_image_size is None:
            raise UserError("model.condition_image_size=null: the text encoder sees each reference. Set an area.")
        self.edit_scheme, self.scheme = edit_scheme, SCHEMES.get(edit_scheme or "")
        if self.scheme is not None:
            self.condition_images = ConditionImages(
                condition_image_size=condition_image_size,
                most_area=self.geometry.resolution**2,
                fits_target=self.scheme.fitted,
            )
            self.latent_pipeline = type(LatentKrea2.__name__, (LatentKrea2,), {"scheme": self.scheme})

    def encoding_settings(self) -> dict[str, Any]:
        size = self.condition_images.condition_image_size
        edits = {} if size is None else {"condition_image_size": size, "edit_scheme": self.edit_scheme}
        return super().encoding_settings() | edits

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return prompt_embeds (L, layers, D) and prompt_embeds_mask (L,), without the pipeline's padding.

        Padding has no position and is masked, so that the others are as with it; 512 tokens would be 31 MB.
        """
        pipeline = text_pipeline(self.pipeline_name, parts, self.text_components)
        if layers := self.base.index.get("text_encoder_select_layers"):
            vars(pipeline)["text_encoder_select_layers"] = layers  # its own setter is for components only
        embeds = self._states(pipeline, prompt, images, parts.device("text_encoder")).to(parts.dtype)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(len(embeds), dtype=torch.bool)}

    def _states(self, pipeline: Any, prompt: str, images: list[Tensor], device: torch.device) -> Tensor:
        """Return the outputs of the chosen layers (L, layers, D) for images, prompt and end of the template."""
        if self.scheme is None or not images:
            states, mask = pipeline.get_text_hidden_states(prompt, self.max_sequence_length, device)
            return states[mask]
        from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

        vision = pipeline.text_encoder.config.vision_config
        patches = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        pixels = Qwen2VLImageProcessor(**PIXELS, **patches, temporal_patch_size=vision.temporal_patch_size)
        processor = Qwen3VLProcessor(pixels, pipeline.tokenizer, Qwen3VLVideoProcessor())
        label = self.scheme.label
        slots = [f"{label.format(i)}<|vision_start|><|image_pad|><|vision_end|>" for i in range(1, len(images) + 1)]
        chat = [pipeline.prompt_template_encode_prefix, *slots, prompt, pipeline.prompt_template_encode_suffix]
        seen = processor(text=["".join(chat)], images=images, return_tensors="pt").to(device)
        outputs = pipeline.text_encoder(**seen, output_hidden_states=True).hidden_states
        states = torch.stack([outputs[layer] for layer in pipeline.text_encoder_select_layers], dim=2)
        return states[0, pipeline.prompt_template_encode_start_idx :]

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int] | None:
        if self.scheme is not None:  # with images they are not truncated
            return None
        pipeline = text_pipeline(self.pipeline_name, parts, ["tokenizer"])
        chats = [pipeline.prompt_template_encode_prefix + prompt for prompt in prompts]
        more = pipeline.prompt_template_encode_num_suffix_tokens - pipeline.prompt_template_encode_start_idx
        return [len(ids) + more for ids in pipeline.tokenizer(chats).input_ids], self.max_sequence_length

    def text_length(self, prompt: str, images: list[tuple[int, int]]) -> int:
        """Return the length at four characters a token; for images one for 32x32 pixels, with a few words between."""
        area = self.condition_images.condition_image_size or 0
        sizes = [size_of_area(*image, area) for image in images]
        text = min(8 + len(prompt) // 4, self.max_sequence_length)
        return text + sum(width * height // 1024 + 6 for width, height in sizes)

    def prompt_shapes(
        self, config: Mapping[str, Any], prompt: str, images: list[tuple[int, int]]
    ) -> dict[str, tuple[int, ...]]:
        length = self.text_length(prompt, images)
        return {"prompt_embeds": (length, config["num_text_layers"], config["text_hidden_dim"])}

    # The transformer

    def velocity(
        self, transformer: Any, x_t: Tensor, t: Tensor, controls: list[Tensor], prompt: Mapping[str, Tensor]
    ) -> Tensor:
        if self.scheme is None:
            return krea2_velocity(transformer, x_t, t, prompt)
        with references(transformer, controls, x_t.shape[-2:], self.scheme):
            return krea2_velocity(transformer, x_t, t, prompt)
