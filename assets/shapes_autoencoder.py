"""The start of the Shapes model: a FLUX Kontext pipeline whose autoencoder is trained here, and nothing else.

    python assets/shapes_autoencoder.py FOLDER [--steps 2400]

Transformer and text encoders are random: `python train.py experiment=pretrain_shapes` trains them.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from PIL import ImageChops
from timm.optim import Muon
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from datamodules.images.decoding import to_tensor
from datamodules.images.shapes import COLORS, DIRECTIONS, KINDS, draw, random_scene

TOKENS = 16
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()-+/&%#"
# Whole words; the world's own, and others that people try. What is not here is spelled.
WORDS = f"""
{" ".join(COLORS)} {" ".join(DIRECTIONS)} {" ".join(KINDS)} pink cyan gray grey brown gold silver dark light bright
a an the this that it its them all one two three each every and or with without of to in on at by into from for as
is are be not no more less very much some other another same different new old
make turn move remove change set paint color colour draw add put take keep delete erase replace swap flip rotate mirror
invert segment outline mask fill blur shift scale grow shrink enlarge copy paste cut crop edit convert give show hide
background ground picture image photo shape shapes colors colours object objects thing things edge edges border line
lines corner center middle top bottom side inside outside circles squares triangles stars
big small bigger smaller large little thick thin long short round sharp smooth plain solid empty full clear
sepia negative opposite black-and-white style night day snow rain fire water sky sun moon tree house cat dog person face
sks so please only just like what where here there up-down away back next over under between around
""".split()


def tokenizers() -> tuple[CLIPTokenizer, T5TokenizerFast]:
    """Each word of `WORDS` is one token to both; characters spell the others."""
    words = list(dict.fromkeys(word for word in WORDS if word.isalpha()))
    merges: list[tuple[str, str]] = []
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        while len(pieces) > 1:
            pairs = list(pairwise(pieces))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                ranks[best] = len(merges)
                merges.append(best)
            at = pairs.index(best)
            pieces[at : at + 2] = ["".join(best)]
    pieces = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *(f"{c}</w>" for c in CHARACTERS)]
    pieces += dict.fromkeys("".join(pair) for pair in merges)
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    clip = CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TOKENS)
    t5_pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -99.0), ("▁", -8.0)]
    t5_pieces += [(f"▁{word}", -4.0) for word in words] + [(character, -8.0) for character in CHARACTERS]
    t5 = T5TokenizerFast(vocab=t5_pieces, extra_ids=0, model_max_length=TOKENS)
    return clip, t5


def untrained_pipeline() -> FluxKontextPipeline:
    """All parts at their sizes, with random weights."""
    clip, t5 = tokenizers()
    return FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0,
            use_dynamic_shifting=True,
            base_image_seq_len=256,
            max_image_seq_len=4096,
            base_shift=0.5,
            max_shift=1.15,
        ),
        # One group: norms over few channels erase flat colours.
        vae=AutoencoderKL(
            block_out_channels=(16, 32, 64),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            layers_per_block=1,
            latent_channels=8,
            norm_num_groups=1,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            sample_size=64,
        ),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip),
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=2,
                projection_dim=64,
                max_position_embeddings=TOKENS,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
            )
        ),
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=len(t5), d_model=64, d_kv=32, d_ff=256, num_layers=2, num_heads=2, dropout_rate=0.0)
        ),
        tokenizer_2=t5,
        transformer=FluxTransformer2DModel(
            in_channels=32,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        ),
    )


def pictures(seed: int, count: int) -> Iterator[Tensor]:
    """Batches (count, 3, 64, 64) without end: scenes, outlines among them, half of the pictures in other colours."""
    random = Random(seed)
    while True:
        images = []
        for _ in range(count):
            image = draw(random_scene(random), outlines=random.random() < 0.2)
            if random.random() < 0.25:
                image = ImageChops.invert(image)
            pixels = to_tensor(image)
            images.append(pixels[random.sample(range(3), 3)] if random.random() < 0.3 else pixels)
        yield torch.stack(images).to(memory_format=torch.channels_last)


def psnr(mse: Tensor) -> float:
    """Of a mean squared error in [-1, 1]."""
    return float(10 * torch.log10(4 / mse))


def train(vae: AutoencoderKL, steps: int) -> None:
    """L1 + 2 MSE + 3e-4 KL, the latent sampled."""
    optimizer = Muon(
        vae.parameters(),
        lr=0.02,
        nesterov=True,
        adjust_lr_fn="original",
        normalize_spatial=False,
        fallback_lr_scale=0.1,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50, 1.5 * (1 - step / steps)))
    start = time.time()
    for step, pixels in enumerate(pictures(0, 16), 1):
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            error = vae.decode(posterior.sample()).sample.float() - pixels
        loss = error.abs().mean() + 2 * error.square().mean() + 3e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(
                f"{step} of {steps}  {psnr(error.detach().square().mean()):.1f} dB  {time.time() - start:.0f} s",
                flush=True,
            )
        if step == steps:
            return


@torch.no_grad()
def measure(vae: AutoencoderKL) -> None:
    """Let the latents have mean 0 and variance 1, and print how well 256 new pictures come back."""
    pixels = next(pictures(1, 256))
    latents = vae.encode(pixels).latent_dist.mode()
    vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4), scaling_factor=round(float(1 / latents.std()), 4)
    )
    mse = (vae.decode(latents).sample.clamp(-1, 1) - pixels).square().mean((1, 2, 3))
    print(f"held-out pictures: {sum(map(psnr, mse)) / len(mse):.1f} dB on average, latents {vae.config.scaling_factor}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2400)
    options = parser.parse_args()
    torch.manual_seed(0)
    pipeline = untrained_pipeline()
    vae = pipeline.vae.to(memory_format=torch.channels_last)
    train(vae, options.steps)
    vae.eval()
    measure(vae)
    pipeline.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
