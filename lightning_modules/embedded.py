"""The model that `model=embedded` stands for: a tiny FLUX Kontext pipeline, so that everything runs anywhere.

It is built once, from a seed, with random weights: it shows that the machinery works, its pictures are noise. A
model that has learned something replaces it here: let `embedded_model` return that model's folder.
"""

import hashlib
import os
import shutil
import string
import tempfile
from pathlib import Path

import torch

SEED = 20260113
CHARACTERS = string.ascii_letters + string.digits + ".,;:!?'\"()-+/&%#"


def embedded_model() -> Path:
    """The folder of the embedded model; built on first use in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retouch"
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"embedded-{recipe}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        build_pipeline(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder


def build_pipeline(folder: Path, seed: int = SEED, heads: int = 4) -> None:
    """Write a tiny FluxKontextPipeline in diffusers' layout; every part is of the real class."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxKontextPipeline,
        FluxTransformer2DModel,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
        T5TokenizerFast,
    )

    clip_pieces = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *(f"{c}</w>" for c in CHARACTERS)]
    t5_pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", -9.0),
        ("▁", -1.0),
        *((c, -2.0) for c in CHARACTERS),
    ]
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(seed)
        pipeline = FluxKontextPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                shift=3.0,
                use_dynamic_shifting=True,
                base_image_seq_len=256,
                max_image_seq_len=4096,
                base_shift=0.5,
                max_shift=1.15,
            ),
            vae=AutoencoderKL(
                block_out_channels=(8, 16, 16, 16),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                layers_per_block=1,
                latent_channels=8,
                norm_num_groups=4,
                mid_block_add_attention=False,
                use_quant_conv=False,
                use_post_quant_conv=False,
                scaling_factor=0.3611,
                shift_factor=0.1159,
            ),
            text_encoder=CLIPTextModel(
                CLIPTextConfig(
                    vocab_size=len(clip_pieces),
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=2,
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
                in_channels=32,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=heads,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                guidance_embeds=True,
                axes_dims_rope=(4, 6, 6),
            ),
        )
    pipeline.save_pretrained(folder)
