"""Train in a plain loop over diffusers and peft, without framework or logging: the floor for training_speed.py.

As in train.py, each prompt is encoded once and AdamW is fused. `cached` also encodes each image once, and keeps it in
memory.

training_speed.py runs `python benchmarks/floor.py pairs|cached MODEL DATA STEPS BATCH RANK OUT`, which writes a line to
OUT after each step, like metrics.csv.
"""

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxTransformer2DModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from peft import LoraConfig
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast


def load(path: Path) -> torch.Tensor:
    """Load an image as (3, H, W) in [-1, 1]."""
    return torch.from_numpy(np.asarray(Image.open(path).convert("RGB"), dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1


def main(kind: str, model: str, data: Path, steps: int, batch: int, rank: int, out: Path) -> None:
    torch.manual_seed(0)
    f32 = {"dtype": torch.float32}
    vae = AutoencoderKL.from_pretrained(model, subfolder="vae", **f32).requires_grad_(False)
    clip = CLIPTextModel.from_pretrained(model, subfolder="text_encoder", **f32).requires_grad_(False)
    t5 = T5EncoderModel.from_pretrained(model, subfolder="text_encoder_2", **f32).requires_grad_(False)
    clip_tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    t5_tokenizer = T5TokenizerFast.from_pretrained(model, subfolder="tokenizer_2")
    transformer = FluxTransformer2DModel.from_pretrained(model, subfolder="transformer", **f32).requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    names = sorted(path.stem for path in (data / "training_images").glob("*.png"))
    pack, ids = FluxKontextPipeline._pack_latents, FluxKontextPipeline._prepare_latent_image_ids

    @torch.no_grad()
    def encode(name: str) -> tuple[DiagonalGaussianDistribution, torch.Tensor]:
        target, control = (
            load(data / folder / f"{name}.png")[None] for folder in ("training_images", "control_images")
        )
        return vae.encode(target).latent_dist, vae.encode(control).latent_dist.mode()

    latents = {name: encode(name) for name in names} if kind == "cached" else {}
    encoded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with out.open("w", buffering=1) as file:
        file.write("step,seconds\n")
        start = time.perf_counter()
        for step in range(1, steps + 1):
            chosen = random.choices(names, k=batch)
            prompts = [(data / "training_images" / f"{name}.txt").read_text() for name in chosen]
            with torch.no_grad():
                targets, sources = zip(*(latents[name] if latents else encode(name) for name in chosen), strict=True)
                x0, source = torch.cat([target.sample() for target in targets]), torch.cat(sources)
                x0, source = ((z - vae.config.shift_factor) * vae.config.scaling_factor for z in (x0, source))
                for prompt in prompts:
                    if prompt not in encoded:
                        arguments = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
                        ids_1 = clip_tokenizer([prompt], **arguments).input_ids
                        ids_2 = t5_tokenizer([prompt], max_length=16, **arguments).input_ids
                        encoded[prompt] = clip(ids_1).pooler_output, t5(ids_2)[0]
                pooled, embeds = (torch.cat(parts) for parts in zip(*(encoded[p] for p in prompts), strict=True))
            _, channels, height, width = x0.shape
            eps, t = torch.randn_like(x0), torch.sigmoid(torch.randn(batch))
            x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * eps
            packed = [pack(z, batch, channels, height, width) for z in (x_t, source)]
            image_ids = [ids(batch, height // 2, width // 2, "cpu", torch.float32) for _ in range(2)]
            image_ids[1][:, 0] = 1
            predicted = transformer(
                hidden_states=torch.cat(packed, 1),
                timestep=t,
                guidance=torch.ones(batch) if transformer.config.guidance_embeds else None,
                pooled_projections=pooled,
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(embeds.shape[1], 3),
                img_ids=torch.cat(image_ids),
            ).sample[:, : packed[0].shape[1]]
            loss = (predicted - pack(eps - x0, batch, channels, height, width)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            file.write(f"{step},{time.perf_counter() - start:.6f}\n")


if __name__ == "__main__":
    kind, model, data, steps, batch, rank, out = sys.argv[1:]
    main(kind, model, Path(data), int(steps), int(batch), int(rank), Path(out))
