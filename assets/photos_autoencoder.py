"""The start of the Photos model: a FLUX Kontext pipeline whose autoencoder is made here, for photographs.

    python assets/photos_autoencoder.py PHOTOGRAPHS FOLDER [--minutes 40]

The encoder is exactly a principal component analysis of patches of 4x4 pixels, set as weights of diffusers'
AutoencoderKL; the decoder learns to invert it. Transformer and text encoders are random: `python train.py
experiment=pretrain_photos` trains the transformer, and the text encoders stay as they are.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from photos_pairs import UNSEEN, WORDS, Photographs, held_out_photographs, prompts_of_edits
from timm.optim import Muon
from tokenizers.models import Unigram
from torch import Tensor, nn
from torch.nn.functional import pixel_unshuffle
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

SHAPES = Path(__file__).with_name("shapes")
PATCH, CHANNELS, WIDTHS = 4, 18, (32, 48, 64)
# Constants that make the group norm's variance that of a constant: far larger than any latent.
ANCHOR = 512.0


def untrained_autoencoder() -> AutoencoderKL:
    """Return an autoencoder with random weights."""
    sizes = {"latent_channels": CHANNELS, "block_out_channels": WIDTHS, "scaling_factor": 1.0, "shift_factor": 0.0}
    return AutoencoderKL.from_config({**AutoencoderKL.load_config(SHAPES / "vae"), **sizes})


def untrained_pipeline(vae: AutoencoderKL) -> FluxKontextPipeline:
    """Return all parts but the autoencoder with random weights, and tokenizers of the words of the edits."""
    corpus = [*prompts_of_edits(), *WORDS.split(), *UNSEEN.split(), *"abcdefghijklmnopqrstuvwxyz0123456789"]
    clip = AutoTokenizer.from_pretrained(SHAPES / "tokenizer").train_new_from_iterator(corpus, 1000)
    t5 = AutoTokenizer.from_pretrained(SHAPES / "tokenizer_2")
    words = sorted({word for line in corpus for word in line.lower().split()})
    scores = {"<pad>": 0, "</s>": 0, "<unk>": -99, "\u2581": -8} | {
        f"\u2581{word}": -4 for word in words if len(word) > 1
    }
    scores |= {letter: -10 for line in corpus for letter in line.lower() if letter != " "}
    t5.backend_tokenizer.model = Unigram([(word, float(score)) for word, score in scores.items()], unk_id=2)
    text = CLIPTextConfig.from_pretrained(SHAPES / "text_encoder", vocab_size=len(clip), dtype=None)
    t5_model = T5EncoderModel(T5Config.from_pretrained(SHAPES / "text_encoder_2", vocab_size=len(t5), dtype=None))
    attend_to_previous_word(t5_model)
    transformer = FluxTransformer2DModel.load_config(SHAPES / "transformer")
    sizes = {"in_channels": 4 * CHANNELS, "num_attention_heads": 5, "num_single_layers": 6}
    return FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(SHAPES / "scheduler"),
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=clip,
        text_encoder_2=t5_model,
        tokenizer_2=t5,
        transformer=FluxTransformer2DModel.from_config({**transformer, **sizes}),
    )


@torch.no_grad()
def attend_to_previous_word(encoder: T5EncoderModel) -> None:
    """Let the first head of each layer attend to the word before, so that words know what they belong to.

    FLUX gives words no positions, and training does not find this out: position biases are small beside T5's logits,
    which are not scaled.
    """
    for block in encoder.encoder.block:
        attention = block.layer[0].SelfAttention
        attention.q.weight[: attention.key_value_proj_dim] = 0
    bias = encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight  # of all layers
    bias[:, 0] = 0
    bias[1, 0] = 12  # the bucket of the position before


def principal_components(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (48,) of patches of (N, 3, height, width), and the basis (48, 18) of the latents.

    Each component is divided by the root of its deviation: with the deviations themselves the last ones are lost in
    the noise, without any the loss is spent on them.
    """
    patches = pixel_unshuffle(pixels, PATCH).permute(0, 2, 3, 1).reshape(-1, 3 * PATCH**2)
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(patches.double().T))
    basis = vectors.flip(1)[:, :CHANNELS].float() / values.flip(0)[:CHANNELS].float() ** 0.25
    return mean, basis / ((patches - mean) @ basis).std()


def encoded(pixels: Tensor, mean: Tensor, basis: Tensor) -> Tensor:
    """Return the latents (N, 18, height/4, width/4) by the basis."""
    patches = pixel_unshuffle(pixels, PATCH).permute(0, 2, 3, 1) - mean
    return (patches @ basis).permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def set_encoder(encoder: nn.Module, mean: Tensor, basis: Tensor) -> None:
    """Set the encoder's weights so that its mean is the projection onto the basis.

    Each stride moves windows of 2x2 pixels into channels, residual branches are zero, and the last block's shortcut
    is the basis. It makes z, -z and constants, which fix the group norm; silu(z) - silu(-z) = z passes the SiLU.
    """
    for parameter in encoder.parameters():
        parameter.zero_()
    for module in encoder.modules():
        if isinstance(module, nn.GroupNorm):
            module.weight.fill_(1)
    first, second, last = encoder.down_blocks
    for channel in range(3):
        encoder.conv_in.weight[channel, channel, 1, 1] = 1
    for convolution, count in ((first.downsamplers[0].conv, 3), (second.downsamplers[0].conv, 12)):
        for channel in range(count):
            for y, x in np.ndindex(2, 2):
                convolution.weight[4 * channel + 2 * y + x, channel, y, x] = 1
    for channel in range(12):
        second.resnets[0].conv_shortcut.weight[channel, channel, 0, 0] = 1
    # Where two strides of 2 put the pixel that one of 4 puts at 16 colour + 4 y + x.
    order = [4 * (4 * c + 2 * (y % 2) + x % 2) + 2 * (y // 2) + x // 2 for c, y, x in np.ndindex(3, 4, 4)]
    shortcut, width = last.resnets[0].conv_shortcut, WIDTHS[-1]
    for start, sign in ((0, 1), (CHANNELS, -1)):
        shortcut.weight[start : start + CHANNELS, order, 0, 0] = sign * basis.T
        shortcut.bias[start : start + CHANNELS] = -sign * (mean @ basis)
    rest = width - 2 * CHANNELS
    shortcut.bias[2 * CHANNELS :] = torch.tensor([ANCHOR, -ANCHOR]).repeat_interleave(rest // 2)
    encoder.conv_norm_out.weight.fill_(ANCHOR * (rest / width) ** 0.5)
    for channel in range(CHANNELS):
        encoder.conv_out.weight[channel, channel, 1, 1] = 1
        encoder.conv_out.weight[channel, CHANNELS + channel, 1, 1] = -1
    encoder.conv_out.bias[CHANNELS:] = -30  # the logarithm of the variance


def train_decoder(
    decoder: nn.Module, photographs: Photographs, mean: Tensor, basis: Tensor, minutes: float, state: Path
) -> None:
    """Minimize L1 + 4 MSE, at the end MSE alone, on crops of 64x64 and 128x128 by Muon.

    Args:
        minutes: length of the whole training, over which the learning rate falls.
        state: file with the decoder and the seconds so far, saved each minute; training goes on from it if it exists.
    """
    decoder.to(memory_format=torch.channels_last)
    for module in decoder.modules():
        if type(module).__name__ == "ResnetBlock2D":
            nn.init.zeros_(module.conv2.weight)
            nn.init.zeros_(module.conv2.bias)
    settings = {"nesterov": True, "adjust_lr_fn": "original", "normalize_spatial": False, "fallback_lr_scale": 0.1}
    optimizer = Muon(decoder.parameters(), lr=0.02, **settings)
    start, step, shown = time.time(), 0, 0.0
    if state.is_file():
        saved = torch.load(state)
        decoder.load_state_dict(saved["decoder"])
        start -= saved["seconds"]
    held = held_out(128)
    while (share := (time.time() - start) / (60 * minutes)) < 1:
        if step % 1500 == 0:
            pools = [photographs.batch(count, size) for count, size in ((800, 128), (300, 256))]
        if time.time() - shown > 60:
            shown = time.time()
            held_psnr = quality(decoder, mean, basis, held)
            print(f"{share * minutes:.1f} minutes  step {step}  {held_psnr:.2f} dB", flush=True)
            torch.save({"decoder": decoder.state_dict(), "seconds": time.time() - start}, state)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1, (step + 1) / 20, 1.3 * (1 - share) + 0.01)
        # The group norms see the whole of an image: its size and its scale vary.
        pool, side = pools[step % 3 == 0], 128 if step % 5 == 0 else 64
        top, left = (4 * int(value) for value in torch.randint(0, (pool.shape[-1] - side) // 4 + 1, (2,)))
        pixels = pool[torch.randint(len(pool), (12 * 64**2 // side**2,)), :, top : top + side, left : left + side]
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        latents = encoded(pixels, mean, basis)
        latents = latents + (0.02 if share < 0.7 else 0.01) * torch.randn_like(latents)
        with torch.autocast("cpu", torch.bfloat16):
            result = decoder(latents.contiguous(memory_format=torch.channels_last))
        error = result.float() - pixels
        loss = 4 * error.square().mean() + (error.abs().mean() if share < 0.7 else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1


@torch.no_grad()
def quality(decoder: nn.Module, mean: Tensor, basis: Tensor, pixels: Tensor) -> float:
    """Return the mean PSNR in dB of decoded images (N, 3, height, width) in [-1, 1]."""
    decoder.eval()
    result = torch.cat([decoder(part) for part in encoded(pixels, mean, basis).split(8)]).clamp(-1, 1)
    decoder.train()
    return float((10 * torch.log10(4 / (result - pixels).square().mean((1, 2, 3)))).mean())


def held_out(size: int) -> Tensor:
    """Return 30 crops (30, 3, size, size) of photographs that nothing is trained on."""
    return Photographs(held_out_photographs(), seed=1, least=0.5).batch(30, size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    options.folder.mkdir(parents=True, exist_ok=True)
    photographs = Photographs.of_folder(options.photographs, seed=0)
    mean, basis = principal_components(photographs.batch(900, 128))
    vae = untrained_autoencoder()
    set_encoder(vae.encoder, mean, basis)
    pipeline = untrained_pipeline(vae)
    held = held_out(128)
    want = encoded(held, mean, basis)
    off = float((vae.encode(held).latent_dist.mode().detach() - want).abs().max())
    print(f"encoder: {off:.1e} from the components, whose deviation is {float(want.std()):.2f}", flush=True)
    train_decoder(vae.decoder, photographs, mean, basis, options.minutes, Path(f"{options.folder}_decoder.pt"))
    for size in (64, 128, 256):
        print(f"{size} pixels: {quality(vae.decoder, mean, basis, held_out(size)):.2f} dB")
    pipeline.to(torch.bfloat16).save_pretrained(options.folder)
