"""The start of the Shapes model: a FLUX Kontext pipeline whose autoencoder is trained here.

    python assets/shapes_autoencoder.py FOLDER [--steps 2400]

Configurations and tokenizers are those of assets/shapes. Transformer and text encoders are random: `python train.py
experiment=pretrain_shapes` trains them.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from photos_autoencoder import attend_to_previous_word
from PIL import ImageChops
from timm.optim import Muon
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from datamodules.images.decoding import to_tensor
from datamodules.images.shapes import draw, random_scene

SHAPES = Path(__file__).with_name("shapes")


def untrained_pipeline() -> FluxKontextPipeline:
    """Return all parts with random weights."""
    t5 = T5EncoderModel(T5Config.from_pretrained(SHAPES / "text_encoder_2"))
    attend_to_previous_word(t5)
    return FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(SHAPES / "scheduler"),
        vae=AutoencoderKL.from_config(AutoencoderKL.load_config(SHAPES / "vae")),
        text_encoder=CLIPTextModel(CLIPTextConfig.from_pretrained(SHAPES / "text_encoder")),
        tokenizer=AutoTokenizer.from_pretrained(SHAPES / "tokenizer"),
        text_encoder_2=t5,
        tokenizer_2=AutoTokenizer.from_pretrained(SHAPES / "tokenizer_2"),
        transformer=FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(SHAPES / "transformer")),
    )


def drawn_batches(seed: int, count: int) -> Iterator[Tensor]:
    """Yield batches (count, 3, 64, 64) without end: scenes, outlines among them, half of them in other colours."""
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
    """Return the PSNR in dB of a mean squared error in [-1, 1]."""
    return float(10 * torch.log10(4 / mse))


def train_autoencoder(vae: AutoencoderKL, steps: int) -> None:
    """Minimize L1 + 2 MSE + 3e-4 KL on sampled latents."""
    settings = {"nesterov": True, "adjust_lr_fn": "original", "normalize_spatial": False, "fallback_lr_scale": 0.1}
    optimizer = Muon(vae.parameters(), lr=0.02, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50, 1.5 * (1 - step / steps)))
    batches, start = drawn_batches(0, 16), time.time()
    for step in range(1, steps + 1):
        pixels = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixels).latent_dist
            error = vae.decode(posterior.sample()).sample.float() - pixels
        loss = error.abs().mean() + 2 * error.square().mean() + 3e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            quality, seconds = psnr(error.detach().square().mean()), time.time() - start
            print(f"{step} of {steps}  {quality:.1f} dB  {seconds:.0f} s", flush=True)


@torch.no_grad()
def normalize_latents(vae: AutoencoderKL) -> None:
    """Scale latents to mean 0 and variance 1, and print the mean PSNR of 256 new images."""
    pixels = next(drawn_batches(1, 256))
    latents = vae.encode(pixels).latent_dist.mode()
    vae.register_to_config(
        shift_factor=round(float(latents.mean()), 4), scaling_factor=round(float(1 / latents.std()), 4)
    )
    mse = (vae.decode(latents).sample.clamp(-1, 1) - pixels).square().mean((1, 2, 3))
    print(f"held-out images: {sum(map(psnr, mse)) / len(mse):.1f} dB on average, latents {vae.config.scaling_factor}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2400)
    options = parser.parse_args()
    torch.manual_seed(0)
    pipeline = untrained_pipeline()
    vae = pipeline.vae.to(memory_format=torch.channels_last)
    train_autoencoder(vae, options.steps)
    vae.eval()
    normalize_latents(vae)
    pipeline.save_pretrained(options.folder)
