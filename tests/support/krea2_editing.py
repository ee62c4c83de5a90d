"""Editing by Krea 2's two schemes, from their authors' descriptions: no pipeline of diffusers has them."""

import math
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from diffusers import Krea2Pipeline
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLImageProcessor

from datamodules.images.decoding import size_of_area, to_tensor

# Pixels of references for the autoencoder and for the text encoder, and text tokens.
AREA, CONDITION, LENGTH = 96 * 96, 64 * 64, 96


class EditingKrea2(Krea2Pipeline):
    """Samples with references, by a loop of its own."""

    edit_scheme = "after"

    @classmethod
    def of(cls, stock: Krea2Pipeline, edit_scheme: str = "after") -> Self:
        """Return the same pipeline, which edits."""
        pipeline = cls(**stock.components, text_encoder_select_layers=stock.text_encoder_select_layers)
        pipeline.edit_scheme = edit_scheme
        pipeline.transformer.forward = pipeline.forward  # T-LoRA's schedule is attached to it
        return pipeline

    def seen(self, image: Image.Image, sides: tuple[int, int]) -> Image.Image:
        """Return an image as the autoencoder sees it, next to a target of these (rows, columns) of tokens."""
        if self.edit_scheme == "before":
            scale = min(16 * side / own for side, own in zip(sides, (image.height, image.width), strict=True))
            width, height = (int(side * scale) // 16 * 16 for side in image.size)
            left, top = (image.width - width / scale) / 2, (image.height - height / scale) / 2
            box = (left, top, left + width / scale, top + height / scale)
            return image.resize((width, height), Image.Resampling.LANCZOS, box=box)
        scale = min(1.0, math.sqrt(AREA / (image.width * image.height)))
        sides = (int(side * scale) // 16 * 16 for side in image.size)
        return image.resize(tuple(sides), Image.Resampling.LANCZOS)

    def latents_of(self, image: Image.Image, sides: tuple[int, int]) -> Tensor:
        """Return normalized latents (1, C, 1, h, w)."""
        pixels = to_tensor(self.seen(image, sides))[None, :, None].to(self.vae.dtype)
        mean, std = self.statistics()
        return (self.vae.encode(pixels).latent_dist.mode() - mean) / std

    def statistics(self) -> list[Tensor]:
        """Return mean and standard deviation of each channel of a latent."""
        both = (self.vae.config[name] for name in ("latents_mean", "latents_std"))
        return [torch.tensor(one).view(1, -1, 1, 1, 1).to(self.vae.dtype) for one in both]

    def text(self, prompt: str, images: list[Image.Image]) -> Tensor:
        """Return the language model's states (1, L, layers, D), with a slot of tokens for each image."""
        if not images:
            states, mask = self.get_text_hidden_states(prompt, LENGTH, torch.device("cpu"))
            return states[mask][None]
        process = Qwen2VLImageProcessor(
            patch_size=16,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            size={"shortest_edge": 65536, "longest_edge": 16777216},
        )
        seen = [image.resize(size_of_area(*image.size, CONDITION), Image.Resampling.LANCZOS) for image in images]
        pixels = process(images=seen, return_tensors="pt")
        chat = self.prompt_template_encode_prefix
        for number, grid in enumerate(pixels.image_grid_thw, 1):
            label = f"Picture {number}: " if self.edit_scheme == "after" else ""
            chat += f"{label}<|vision_start|>{'<|image_pad|>' * (int(grid.prod()) // 4)}<|vision_end|>"
        tokens = self.tokenizer(chat + prompt + self.prompt_template_encode_suffix, return_tensors="pt")
        kinds = (tokens.input_ids == self.text_encoder.config.image_token_id).int()
        states = self.text_encoder(**tokens, **pixels, mm_token_type_ids=kinds, output_hidden_states=True).hidden_states
        return torch.stack([states[layer] for layer in self.text_encoder_select_layers], dim=2)[:, 34:]

    def velocity(self, x_t: Tensor, sides: tuple[int, int], t: Tensor, prompt: str, images: Any) -> Tensor:
        """(1, N, C) -> (1, N, C); `sides` of the target's grid of tokens."""
        return self.transformer(hidden_states=x_t, timestep=t, sides=sides, prompt=prompt, images=images)

    def forward(self, hidden_states: Tensor, timestep: Tensor, sides=None, prompt="", images=None, **stock) -> Any:
        """Compute `velocity`, or what the stock transformer does if there are no images."""
        model: Any = self.transformer
        x_t, t = hidden_states, timestep
        if images is None:
            return type(model).forward(model, hidden_states=x_t, timestep=t, **stock)
        text = model.txt_in(model.text_fusion(self.text(prompt, images)))
        parts, places = [model.img_in(x_t)], [grid_places(0, *sides)]
        for index, image in enumerate(images, 1):
            latent = self.latents_of(image, sides)
            height, width = (side // 2 for side in latent.shape[-2:])
            tokens = self._pack_latents(latent, 1, latent.shape[1], 2 * height, 2 * width)
            down, right = max(0, (sides[0] - height) / 2), max(0, (sides[1] - width) / 2)
            place = grid_places(index, height, width)
            parts.append(model.img_in(tokens))
            places.append(place + torch.tensor([0, down, right]) if self.edit_scheme == "before" else place)
        if self.edit_scheme == "before":  # the references come first, and all have the target's time
            parts, places = [*parts[1:], parts[0]], [*places[1:], places[0]]
        start = text.shape[1] + (sum(one.shape[1] for one in parts[:-1]) if self.edit_scheme == "before" else 0)
        target = slice(start, start + x_t.shape[1])
        hidden = torch.cat([text, *parts], 1)
        freqs = model.rotary_emb(torch.cat([torch.zeros(text.shape[1], 3), *places]))
        time = model.time_embed(t, hidden.dtype)
        now, clean = (model.time_mod_proj(F.gelu(one, approximate="tanh")) for one in (time, model.time_embed(0 * t, hidden.dtype)))  # fmt: skip  # noqa: E501
        for block in model.transformer_blocks:
            spans = [(now, slice(0, target.stop))]
            if images and self.edit_scheme == "after":
                spans.append((clean, slice(target.stop, None)))
            else:
                spans = [(now, slice(None))]
            rows = [((one.unflatten(-1, (6, -1)) + block.scale_shift_table).unbind(-2), span) for one, span in spans]

            def modulated(x, scale, shift, rows=rows):
                return torch.cat([(1 + row[scale]) * x[:, span] + row[shift] for row, span in rows], 1)

            def gated(x, gate, rows=rows):
                return torch.cat([row[gate] * x[:, span] for row, span in rows], 1)

            attended = block.attn(modulated(block.norm1(hidden), 0, 1), image_rotary_emb=freqs)
            hidden = hidden + gated(attended, 2)
            hidden = hidden + gated(block.ff(modulated(block.norm2(hidden), 3, 4)), 5)
        return model.final_layer(hidden[:, target], time)

    @torch.no_grad()
    def __call__(self, prompt, num_inference_steps, guidance_scale, width, height, generator, image=(), **more):
        sides = height // 16, width // 16
        x = torch.randn(1, 4, height // 8, width // 8, generator=generator, dtype=self.vae.dtype)
        x = self._pack_latents(x, 1, 4, height // 8, width // 8)
        mu = 0.5 + (1.15 - 0.5) / (6400 - 256) * (sides[0] * sides[1] - 256)
        sigmas = [1 - i / num_inference_steps for i in range(num_inference_steps)]
        self.scheduler.set_timesteps(sigmas=sigmas, mu=mu)
        for now in self.scheduler.timesteps:
            self._current_timestep = now
            v = self.velocity(x, sides, (now[None] / 1000).to(x), prompt, list(image))
            if guidance_scale > 0:
                away = self.velocity(x, sides, (now[None] / 1000).to(x), more.get("negative_prompt", ""), list(image))
                v = v + guidance_scale * (v - away)
            x = self.scheduler.step(v, now, x).prev_sample
        latents = self._unpack_latents(x, height, width)
        mean, std = self.statistics()
        pixels = self.vae.decode(latents / (1 / std) + mean).sample[:, :, 0]
        return SimpleNamespace(images=self.image_processor.postprocess(pixels, output_type=more["output_type"]))


def grid_places(index: int, height: int, width: int) -> Tensor:
    """Return (height * width, 3): the index of the image, row, column."""
    rows = torch.arange(height).repeat_interleave(width)
    return torch.stack([torch.full_like(rows, index), rows, torch.arange(width).repeat(height)], 1).float()
