"""FLUX.3 Image Klein: target, references and text in blocks of their own, then in common ones."""

import math
from typing import Any, ClassVar

from torch import Tensor

from datamodules.batch import Geometry
from datamodules.images.windows import ConditionImages
from lightning_modules.families.flux.native_names import NORM_ENDS
from lightning_modules.families.flux2.module import Flux2Latents
from lightning_modules.families.flux3.denoise import flux3_velocity
from lightning_modules.families.flux3.pipeline import LatentFlux3
from lightning_modules.family import Layers, Parts, SamplingRules
from lightning_modules.lora_files.names import NativeNames

# A prompt's tokens are padded to a multiple of the first, which counts, and cut to the second.
TEXT_WINDOW, MAX_TOKENS = 80, 8192

# The layers of a block by Black Forest Labs' own names, and all blocks.
LAYERS = {
    **{f"{name}_proj": f"attn.to_{name}" for name in "qkv"},
    "attn_out": "attn.to_out.0",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
BLOCKS = {
    "content_mode_blocks.image.{}": "mode_blocks.image.{}",
    "content_mode_blocks.image_cond.{}": "mode_blocks.image_cond.{}",
    "txt_mode_blocks.{}": "txt_mode_blocks.{}",
    "single_blocks.{}": "single_transformer_blocks.{}",
}
BLOCK_LAYERS = {
    f"{ours}.{own}": (f"{block}.{layer}",) for ours, block in BLOCKS.items() for own, layer in LAYERS.items()
}
NATIVE_NAMES = NativeNames(
    layers={
        **BLOCK_LAYERS,
        **{f"emb_in.{mode}": (f"x_embedders.{mode}",) for mode in ("image", "image_cond")},
        "txt_in": ("context_embedder",),
        **{f"time_in.{end}_layer": (f"timestep_embedder.linear_{n}",) for n, end in ((1, "in"), (2, "out"))},
        **{
            f"{when}_stream_modulations.{mode}.lin": (f"{when}_stream_modulations.{mode}.linear",)
            for when in ("early", "single")
            for mode in ("image", "image_cond", "txt")
        },
        "final_layer.image.adaLN_modulation.1": ("norm_out.linear",),
        "final_layer.image.linear": ("proj_out",),
    },
    # There shift and scale, in diffusers scale and shift.
    swapped=("norm_out.linear",),
    readers="flux3",
    saved=tuple(BLOCK_LAYERS),
    tensors={
        ours + end: f"{block}.attn.norm_{own}" for ours, block in BLOCKS.items() for end, own in NORM_ENDS.items()
    },
    # Heads that align features in training.
    unused=(r"repa_projectors\..*",),
)


class Flux3Klein(Flux2Latents):
    """FLUX.3 Image Klein Base: up to ten condition images, each of its own size; none in prediction works as well.

    Padding of the text is not masked.
    """

    pipeline_name = "Flux3ModularPipeline"
    transformer_class = "Flux3Transformer2DModel"
    text_components = ("tokenizer", "text_encoder")
    refused: ClassVar = {
        "flow_map": (
            "is distilled to a flow map, which predicts jumps between two timesteps and no velocity: train on "
            "black-forest-labs/flux-3-image-klein-base. Trainers of the distilled model add an assistant adapter "
            "(SimpleTuner/flux-3-klein-image-training-assistant)"
        )
    }
    # As its pipeline's blocks.
    default_components: ClassVar = {"scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 6.93})}
    condition_images = ConditionImages(most=10, most_area=1024**2, crops=True, whole_area=2048**2)
    geometry = Geometry(equal_text=True)
    # All linear layers of the blocks.
    layers = Layers(NATIVE_NAMES, tuple(LAYERS.values()))
    sampling_rules = SamplingRules("guidance_scale")
    latent_pipeline = LatentFlux3

    # Text

    def encode_prompt(self, parts: Parts, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        """Return prompt_embeds (L, 8D), the outputs of eight layers, with padding."""
        from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

        # The language model without its head, whose logits are not needed.
        used = parts["text_encoder"].model, parts["tokenizer"], prompt, parts.device("text_encoder")
        embeds = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(*used, MAX_TOKENS, TEXT_WINDOW)
        return {"prompt_embeds": embeds[0].to(parts.dtype)}

    def text_length(self, prompt: str, images: list[tuple[int, int]]) -> int:
        """Return the length with the template, at four characters a token."""
        return min(math.ceil((8 + len(prompt) // 4) / TEXT_WINDOW) * TEXT_WINDOW, MAX_TOKENS)

    def prompt_tokens(self, parts: Parts, prompts: list[str]) -> tuple[list[int], int]:
        processor = parts["tokenizer"]
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return [len(ids) for ids in processor.tokenizer(texts).input_ids], MAX_TOKENS

    # The transformer

    velocity = staticmethod(flux3_velocity)

    # Prediction

    def pipeline_code(self, repository: str, dtype: str, arguments: dict[str, Any]) -> list[str]:
        """Leave out the prompt upsampler: prompts are used as they are."""
        scale = arguments.pop("guidance_scale", None)
        return [
            f"pipe = {self.pipeline_name}.from_pretrained({repository!r})",
            "pipe._blocks.sub_blocks.pop('prompt_upsampler')",
            f"pipe.load_components({[*self.text_components, 'vae', 'transformer']}, dtype={dtype})",
            *([] if scale is None else [f"pipe.guider.guidance_scale = {scale}"]),
        ]
