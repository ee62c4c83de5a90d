"""Tiny pipelines of the real classes, random and in float32, in diffusers' folder layout."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    LongCatImageEditPipeline,
    LongCatImageTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from tests.support.tiny_flux2 import build_flux2_dev, build_flux2_klein
from tests.support.tiny_flux3 import build_flux3
from tests.support.tiny_krea2 import build_krea2
from tests.support.tiny_parts import (
    CHARACTERS,
    CHAT,
    LANGUAGE_MODEL,
    QWEN3_TEMPLATE,
    TRANSFORMER,
    VISION,
    build_qwen_vae,
    build_tokenizer,
    qwen_vl_settings,
)
from tests.support.tiny_qwen_2_1 import build_qwen_2_1


def build_vae(channels: int = 8) -> AutoencoderKL:
    """Build a small autoencoder with FLUX.1's blocks."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )


def build_pipeline(folder: Path, seed: int, heads: int = 4) -> None:
    """Write a tiny FluxKontextPipeline in diffusers' layout; every part is of the real class."""
    clip_pieces = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *(f"{c}</w>" for c in CHARACTERS)]
    t5_pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -1.0), *((c, -2.0) for c in CHARACTERS)]
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(seed)
        pipeline = FluxKontextPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=build_vae(),
            text_encoder=CLIPTextModel(
                CLIPTextConfig(
                    **LANGUAGE_MODEL,
                    vocab_size=len(clip_pieces),
                    projection_dim=32,
                    bos_token_id=0,
                    eos_token_id=1,
                    pad_token_id=1,
                )
            ),
            tokenizer=CLIPTokenizer(
                vocab={piece: i for i, piece in enumerate(clip_pieces)}, merges=[], model_max_length=77
            ),
            text_encoder_2=T5EncoderModel(
                T5Config(vocab_size=len(t5_pieces), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
            ),
            tokenizer_2=T5TokenizerFast(vocab=t5_pieces, extra_ids=0, model_max_length=512),
            transformer=FluxTransformer2DModel(
                **TRANSFORMER | {"num_attention_heads": heads},
                in_channels=32,
                num_single_layers=2,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                guidance_embeds=True,
                axes_dims_rope=(4, 6, 6),
            ),
        )
    pipeline.save_pretrained(folder)


def build_flux_dev(folder: Path) -> None:
    """Kontext's parts under the name of FLUX.1 [dev]."""
    build_pipeline(folder, seed=2)
    FluxPipeline(**FluxKontextPipeline.from_pretrained(folder).components).save_pretrained(folder)


def qwen_vl() -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLProcessor]:
    """Return a vision-language model whose tokens are letters."""
    tokenizer = build_tokenizer([*CHAT, *VISION])
    torch.manual_seed(5)
    settings = qwen_vl_settings(tokenizer)
    vision = settings.pop("vision_config") | {"fullatt_block_indexes": [1], "window_size": 56}
    text_encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, **settings))
    return text_encoder, tokenizer, Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor())


def build_qwen(folder: Path, plus: bool, zero_cond_t: bool = False) -> None:
    """A QwenImageEditPipeline or QwenImageEditPlusPipeline; zero_cond_t as in the 2511 version."""
    text_encoder, tokenizer, processor = qwen_vl()
    pipeline_class = QwenImageEditPlusPipeline if plus else QwenImageEditPipeline
    pipeline_class(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
        ),
        vae=build_qwen_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=processor,
        transformer=QwenImageTransformer2DModel(
            **TRANSFORMER,
            in_channels=16,
            out_channels=4,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
            zero_cond_t=zero_cond_t,
        ),
    ).save_pretrained(folder)


def build_z_image(folder: Path) -> None:
    """A ZImagePipeline; text and images are padded with tokens that do something."""
    tokenizer = build_tokenizer([*CHAT, "<think>", "</think>"], QWEN3_TEMPLATE)
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(6)
        transformer = ZImageTransformer2DModel(
            in_channels=8,
            dim=48,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=3,
            n_kv_heads=3,
            cap_feat_dim=32,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        )
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(token)
        ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=build_vae(),
            text_encoder=Qwen3Model(
                Qwen3Config(
                    **LANGUAGE_MODEL | {"num_hidden_layers": 3},
                    vocab_size=len(tokenizer),
                    num_key_value_heads=1,
                    head_dim=16,
                )
            ),
            tokenizer=tokenizer,
            transformer=transformer,
        ).save_pretrained(folder)


def build_qwen_image(folder: Path) -> None:
    """Qwen-Image-Edit's parts under the name of Qwen-Image."""
    build_qwen(folder, plus=False)
    parts = QwenImageEditPipeline.from_pretrained(folder).components
    del parts["processor"]
    shutil.rmtree(folder)
    QwenImagePipeline(**parts).save_pretrained(folder)


def build_longcat(folder: Path) -> None:
    text_encoder, tokenizer, processor = qwen_vl()
    LongCatImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=build_vae(channels=16),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_processor=processor,
        transformer=LongCatImageTransformer2DModel(
            **TRANSFORMER,
            in_channels=64,
            num_single_layers=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
    ).save_pretrained(folder)


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@dataclass(frozen=True)
class Tiny:
    """A model as the tests see it.

    Attributes:
        build: saves its tiny pipeline in a folder.
        settings: overrides that make it quick.
        data: the kind of data it learns from.
        controls: (width, height) of a sample's condition images.
        call: what its stock pipeline must be told to do as we do.
        guidance: settings of predict.py and of the stock pipeline, by which it guides.
        takes_list: whether that takes several images.
        sized: whether it is told the size of the image; else that follows from the image.
        variant: whether another model stands for it in the suite.
    """

    build: Callable[[Path], None]
    settings: tuple[str, ...]
    data: str = "cached"
    controls: tuple[tuple[int, int], ...] = ((64, 32),)
    call: Mapping[str, Any] = field(default_factory=dict)
    guidance: Mapping[str, Any] = field(default_factory=lambda: {"true_cfg_scale": 3.0, "negative_prompt": "blurry"})
    takes_list: bool = False
    sized: bool = True
    variant: bool = False


# Pixels of condition images, where a model has a size of its own for them.
AREA = 64 * 32
FLUX: dict[str, Any] = {
    "settings": ("model.max_sequence_length=64",),
    "call": {"max_sequence_length": 64},
    "guidance": {"true_cfg_scale": 3.0, "negative_prompt": "blurry", "guidance_scale": 2.0},
}
QWEN: dict[str, Any] = {"settings": (f"model.vae_image_size={AREA}", f"model.condition_image_size={AREA}")}
FLUX2: dict[str, Any] = {
    "settings": FLUX["settings"],
    "call": FLUX["call"],
    "controls": ((64, 64), (64, 96)),  # the stock pipelines take none whose sides are below 64
    "guidance": {"guidance_scale": 3.0},
    "takes_list": True,
}
TOKENS_96: dict[str, Any] = {"settings": ("model.max_sequence_length=96",), "call": {"max_sequence_length": 96}}
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "blurry"}
# By the names of their YAMLs
MODELS = {
    "flux_kontext": Tiny(
        partial(build_pipeline, seed=1),
        settings=FLUX["settings"],
        guidance=FLUX["guidance"],
        call={**FLUX["call"], "_auto_resize": False, "max_area": AREA},
    ),
    "flux_dev": Tiny(build_flux_dev, **FLUX, data="captions", controls=(), variant=True),
    "qwen_image": Tiny(build_qwen_image, settings=(), data="captions", controls=(), variant=True),
    "qwen_image_edit": Tiny(lambda folder: build_qwen(folder, plus=False), **QWEN, variant=True),
    "qwen_image_edit_plus": Tiny(
        lambda folder: build_qwen(folder, plus=True, zero_cond_t=True),
        **QWEN,
        controls=((64, 32), (32, 48)),
        takes_list=True,
    ),
    "flux2_klein_4b": Tiny(build_flux2_klein, **FLUX2),
    "flux2_dev": Tiny(build_flux2_dev, **FLUX2, variant=True),
    "flux3_klein": Tiny(build_flux3, settings=(), controls=FLUX2["controls"], guidance=GUIDED, takes_list=True),
    "z_image": Tiny(build_z_image, **TOKENS_96, data="captions", controls=(), guidance=GUIDED),
    "krea2": Tiny(build_krea2, **TOKENS_96, data="captions", controls=(), guidance=GUIDED, variant=True),
    "krea2_edit": Tiny(
        build_krea2,
        settings=(*TOKENS_96["settings"], "model.resolution=96", "model.condition_image_size=4096"),
        call=TOKENS_96["call"],
        guidance=GUIDED,
        takes_list=True,
    ),
    "longcat_image_edit": Tiny(build_longcat, settings=(f"model.vae_image_size={AREA}",), guidance=GUIDED, sized=False),
    "qwen_image_2_1": Tiny(
        build_qwen_2_1,
        settings=("model.output_resolution=64",),
        controls=((64, 32), (32, 48)),
        call={"output_resolution": 64},
        takes_list=True,
    ),
}


# A variant has the code of another model: only its parity is tested.
DIFFERENT = [name for name, model in MODELS.items() if not model.variant]


def every_model(test: Callable[..., None]) -> Any:
    """Parametrize a test by the models that differ: one of them, another for another test, is in the quick suite."""
    quick = DIFFERENT[crc32(test.__name__.encode()) % len(DIFFERENT)]
    cases = [pytest.param(name, marks=[pytest.mark.slow] * (name != quick)) for name in DIFFERENT]
    return pytest.mark.parametrize("model", cases)(test)
