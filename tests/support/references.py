"""Each family's stock pipeline of diffusers, asked for its parts of the training loss and for its images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions
from PIL import Image
from torch import Tensor

from datamodules.batch import RawBatch
from datamodules.images.decoding import size_of_area, to_tensor
from lightning_modules import flow
from tests.support.pictures import photograph
from tests.support.same_adapters import adapt_like, stock_shift
from tests.support.steps import family
from tests.support.stock_pictures import load_stock, shrink_condition_images

# Pixels of condition images for the autoencoder and for the text encoder.
VAE, CONDITION = 128 * 64, 64 * 64
# With a word in quotes, which LongCat reads by letters, and with a token that FLUX.2 reserves for images.
PROMPTS = ["make it snow", 'Write "Hi" on the [IMG] cat, please, and make it red']
NAMES = ("astronaut", "chelsea", "rocket")
Images = list[Image.Image]


def condition_images(sizes, shift=0) -> Images:
    """Return photographs of these (width, height), other ones for each shift."""
    return [photograph(NAMES[(index + shift) % 3], *size) for index, size in enumerate(sizes)]


@dataclass(frozen=True)
class Reference:
    """A family with its pipeline; the methods are for FLUX.1's latents and packing.

    Attributes:
        settings: overrides of the module.
        call: arguments of the pipeline that make it do the same.
        guided: arguments that turn guidance on; `unguided` those that turn it off.
        length: tokens from which on a prompt is cut; None where only its family's own tests know.
        prompts: prompts of a batch of two, of equal length where padding is not masked.
        size: (width, height) of a sample's target.
    """

    name: str
    settings: tuple[str, ...] = ()
    call: Mapping[str, Any] = field(default_factory=dict)
    guided: Mapping[str, Any] = field(default_factory=lambda: {"true_cfg_scale": 3.0, "negative_prompt": "blurry"})
    unguided: Mapping[str, Any] = field(default_factory=lambda: {"true_cfg_scale": 1.0})
    length: int = 64
    prompts: Sequence[str] = tuple(PROMPTS)
    size: tuple[int, int] = (48, 32)

    def build(self, repository, *overrides):
        """Return the family's module; both halves of its adapter are random, alpha differs from rank."""
        return family(repository, self.name, "adapter.alpha=6", *self.settings, *overrides)

    def stock(self, repository, monkeypatch, **how):
        """Return the pipeline as diffusers loads it, which resizes condition images to fewer pixels, to save time."""
        shrink_condition_images(monkeypatch, VAE, CONDITION)
        pipeline = load_stock(repository, **how)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def arguments(self, images: Images) -> dict[str, Any]:
        return {"image": images[0]} if images else {}

    def load_lora(self, stock, folder) -> None:
        stock.load_lora_weights(folder)

    def shift(self, stock, latents: Tensor) -> float:
        """Return the shift of the timesteps for a target of these latents, where it depends on them."""
        return stock_shift(stock, latents)

    def embeddings(self, stock, prompt: str, images: Images) -> dict[str, Tensor]:
        """Return the prompt's embeddings, without a dimension for samples."""
        embeds, pooled, _ = stock.encode_prompt(prompt, None, max_sequence_length=64)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def encode(self, stock, pixels: Tensor) -> Any:
        """Return the autoencoder's distribution for a target of (1, 3, H, W)."""
        return stock.vae.encode(pixels).latent_dist

    def target(self, stock, latent: Any, drawn: Any) -> tuple[Tensor, Tensor]:
        """Return x0 and the noise as the transformer sees them."""
        config = stock.vae.config
        sampled = latent.mean + latent.std * drawn.latent_eps
        return (sampled - config.shift_factor) * config.scaling_factor, drawn.eps

    def control(self, stock, image: Image.Image) -> Tensor:
        return stock._encode_vae_image(stock.image_processor.preprocess(image), None)

    def pack(self, stock, latents: Tensor) -> Tensor:
        return stock._pack_latents(latents, 1, *latents.shape[1:])

    def velocity(self, stock, x_t: Tensor, t: Tensor, images: Images, prompt: str) -> Tensor:
        """Return the transformer's prediction, packed, also for the tokens of the images after the target's."""
        latents = [x_t, *(self.control(stock, image) for image in images)]
        ids = []
        for index, one in enumerate(latents):
            ids.append(
                stock._prepare_latent_image_ids(1, one.shape[2] // 2, one.shape[3] // 2, "cpu", torch.float32).clone()
            )
            ids[-1][:, 0] = index
        embeds, pooled, text_ids = stock.encode_prompt(prompt, None, max_sequence_length=64)
        return stock.transformer(
            hidden_states=torch.cat([self.pack(stock, one) for one in latents], 1),
            timestep=t,
            guidance=torch.ones(1),
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=torch.cat(ids),
        ).sample

    def losses(self, stock, module, raws, images) -> Tensor:
        """Return each sample's loss (B,) from the pipeline's parts and peft, by the definition of rectified flow."""
        adapt_like(stock.transformer, module.transformer)
        losses = []
        for raw, seen in zip(raws, images, strict=True):
            latent = self.encode(stock, raw.target)
            mean = latent.mean.squeeze(2) if latent.mean.ndim == 5 else latent.mean
            law, shift = module.flow.timesteps, self.shift(stock, mean)
            drawn = flow.sample_noise(module.flow.seed, raw.draws, mean.shape[1:], law, shift)
            x0, eps = self.target(stock, latent, drawn)
            predicted = self.velocity(stock, (1 - drawn.t) * x0 + drawn.t * eps, drawn.t, seen, raw.prompts[0])
            velocity = self.pack(stock, eps - x0)
            losses.append((predicted[:, : velocity.shape[1]] - velocity).square().mean())
        return torch.stack(losses)


class FluxKontext(Reference):
    """FLUX.1 Kontext, which would resize images to one megapixel."""

    def arguments(self, images):
        more = {"max_area": 64 * 48, "_auto_resize": False} if self.name == "flux_kontext" else {}
        return super().arguments(images) | more


class Qwen(Reference):
    """Qwen-Image, whose autoencoder is one for videos, and its editing models."""

    def arguments(self, images):
        return {"image": images} if self.name.endswith("plus") else super().arguments(images)

    def _resized(self, images):
        area = CONDITION if self.name.endswith("plus") else VAE
        return [image.resize(size_of_area(*image.size, area), Image.Resampling.LANCZOS) for image in images]

    def _encode_prompt(self, stock, prompt, images):
        return stock.encode_prompt(prompt, self._resized(images)) if images else stock.encode_prompt(prompt)

    def embeddings(self, stock, prompt, images):
        embeds, mask = self._encode_prompt(stock, prompt, images)
        return {
            "prompt_embeds": embeds[0],
            "prompt_embeds_mask": torch.ones(embeds.shape[1]) if mask is None else mask[0],
        }

    def encode(self, stock, pixels):
        return stock.vae.encode(pixels.unsqueeze(2)).latent_dist

    def target(self, stock, latent, drawn):
        mean, std = (
            torch.tensor(stock.vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std")
        )
        sampled = latent.mean + latent.std * drawn.latent_eps.unsqueeze(2)
        return (sampled - mean) / std, drawn.eps.unsqueeze(2)

    def control(self, stock, image):
        width, height = size_of_area(*image.size, VAE)
        return stock._encode_vae_image(stock.image_processor.preprocess(image, height, width).unsqueeze(2), None)

    def pack(self, stock, latents):
        return stock._pack_latents(latents, 1, latents.shape[1], *latents.shape[-2:])

    def velocity(self, stock, x_t, t, images, prompt):
        latents = [x_t, *(self.control(stock, image) for image in images)]
        embeds, mask = self._encode_prompt(stock, prompt, images)
        return stock.transformer(
            hidden_states=torch.cat([self.pack(stock, one) for one in latents], 1),
            timestep=t,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, one.shape[-2] // 2, one.shape[-1] // 2) for one in latents]],
        ).sample


class Qwen21(Qwen):
    """Qwen-Image-2.1, which sees alpha and has one sequence, the target last."""

    def stock(self, repository, monkeypatch, **how):
        return Reference.stock(self, repository, monkeypatch, **how)

    def arguments(self, images):
        return {"image": images} if images else {}

    def shift(self, stock, latents):
        return stock_shift(stock, latents, patch=1)

    def _seen(self, stock, images):
        side = self.call["output_resolution"]
        sizes = [calculate_dimensions(side * side, image.width / image.height)[:2] for image in images]
        return [
            stock.image_processor.resize(image.convert("RGBA"), width=width, height=height)
            for image, (width, height) in zip(images, sizes, strict=True)
        ]

    def embeddings(self, stock, prompt, images):
        embeds, _, slots = stock._get_qwen_prompt_embeds(prompt, self._seen(stock, images) or None)
        return {"prompt_embeds": embeds[0], "image_pad_mask": slots[0]}

    def control(self, stock, image):
        return stock._encode_vae_image(stock.image_processor.preprocess(image).unsqueeze(2), None)

    def velocity(self, stock, x_t, t, images, prompt):
        seen = self._seen(stock, images)
        embeds, _, slots = stock._get_qwen_prompt_embeds(prompt, seen or None)
        latents = [*(self.control(stock, image) for image in seen), x_t]
        count = x_t.shape[-1] * x_t.shape[-2]
        return stock.transformer(
            hidden_states=torch.cat([self.pack(stock, one) for one in latents], 1),
            timestep=t,
            encoder_hidden_states=embeds,
            img_shapes=[[(1, *one.shape[-2:]) for one in latents]],
            img_mask=torch.cat([slots, slots.new_ones(1, count // 4)], 1),
        ).sample[:, -count:]


class Flux2(Reference):
    """FLUX.2, whose latents are patches, normalised by statistics of the autoencoder."""

    def arguments(self, images):
        return {"image": images or None}

    def embeddings(self, stock, prompt, images):
        return {"prompt_embeds": stock.encode_prompt(prompt, max_sequence_length=64)[0][0]}

    def target(self, stock, latent, drawn):
        statistics = stock.vae.bn
        mean, variance = (one.view(1, -1, 1, 1) for one in (statistics.running_mean, statistics.running_var))
        std = torch.sqrt(variance + stock.vae.config.batch_norm_eps)
        return (stock._patchify_latents(latent.mean) - mean) / std, stock._patchify_latents(drawn.eps)

    def pack(self, stock, latents):
        return stock._pack_latents(latents)

    def controls(self, stock, images, dtype=torch.float32):
        """Return the tokens and position ids of references."""
        cropped = [
            stock.image_processor.preprocess(one, one.height // 16 * 16, one.width // 16 * 16, "crop") for one in images
        ]
        return stock.prepare_image_latents(cropped, 1, None, "cpu", dtype)

    def velocity(self, stock, x_t, t, images, prompt):
        tokens, ids = [self.pack(stock, x_t)], [stock._prepare_latent_ids(x_t)]
        if images:
            more, places = self.controls(stock, images)
            tokens, ids = [*tokens, more], [*ids, places]
        embeds, words = stock.encode_prompt(prompt, max_sequence_length=64)
        return stock.transformer(
            hidden_states=torch.cat(tokens, 1),
            timestep=t,
            guidance=torch.ones(1) if stock.transformer.config.guidance_embeds else None,
            encoder_hidden_states=embeds,
            txt_ids=words,
            img_ids=torch.cat(ids, 1),
        ).sample


class ZImage(Reference):
    """Z-Image, which predicts the negative velocity of 1 - t."""

    def shift(self, stock, latents):
        return 1.0

    def embeddings(self, stock, prompt, images):
        (embeds,), _ = stock.encode_prompt(prompt, None, False, max_sequence_length=96)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(len(embeds))}

    def pack(self, stock, latents):
        return latents

    def velocity(self, stock, x_t, t, images, prompt):
        embeds, _ = stock.encode_prompt(prompt, None, False, max_sequence_length=96)
        (predicted,) = stock.transformer([x_t[0].unsqueeze(1)], (1000 - 1000 * t) / 1000, embeds).sample
        return -predicted.squeeze(1)[None]


class LongCat(Reference):
    """LongCat, whose text encoder sees the image at half the autoencoder's size."""

    def shift(self, stock, latents):
        return 1.0

    def load_lora(self, stock, folder):
        stock.transformer.load_lora_adapter(folder, prefix="transformer", use_safetensors=True)

    def seen(self, stock, image) -> tuple[Tensor, Image.Image]:
        """Return an image as the autoencoder and as the text encoder see it: the first lines of the pipeline's call."""
        width, height = pipeline_longcat_image_edit.calculate_dimensions(None, image.size[0] * 1.0 / image.size[1])
        resized = stock.image_processor.resize(image, height, width)
        small = stock.image_processor.resize(resized, height // 2, width // 2)
        return stock.image_processor.preprocess(resized, height, width), small

    def embeddings(self, stock, prompt, images):
        return {"prompt_embeds": stock._encode_prompt([prompt], self.seen(stock, images[0])[1])[0]}

    def control(self, stock, image):
        return stock._encode_vae_image(self.seen(stock, image)[0], None)

    def velocity(self, stock, x_t, t, images, prompt):
        pixels, small = self.seen(stock, images[0])
        embeds, text_ids = stock.encode_prompt([prompt], small)
        more = torch.float32, embeds.shape[1], torch.device("cpu"), None
        _, _, ids, _ = stock.prepare_latents(None, 1, 16, *(8 * side for side in x_t.shape[2:]), *more)
        _, control, _, control_ids = stock.prepare_latents(pixels, 1, 16, *pixels.shape[-2:], *more)
        return stock.transformer(
            hidden_states=torch.cat([self.pack(stock, x_t), control], dim=1),
            timestep=t,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=torch.cat([ids, control_ids]),
        ).sample


SHORT = ("model.max_sequence_length=64",)
IMAGES = (f"model.vae_image_size={VAE}",)
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "blurry"}
LONGER = ("model.max_sequence_length=96",), {"max_sequence_length": 96}
FLUX = {"settings": SHORT, "call": {"max_sequence_length": 64, "guidance_scale": 2.5}}
FLUX2 = {"settings": SHORT, "call": {"max_sequence_length": 64}, "guided": {"guidance_scale": 4.0}}
FLUX2 |= {"unguided": {"guidance_scale": 1.0}}
REFERENCES = {
    one.name: one
    for one in (
        FluxKontext("flux_kontext", **FLUX),
        FluxKontext("flux_dev", **FLUX),
        Qwen("qwen_image", length=512),
        Qwen("qwen_image_edit", (*IMAGES, f"model.condition_image_size={VAE}")),
        Qwen("qwen_image_edit_plus", (*IMAGES, f"model.condition_image_size={CONDITION}")),
        Flux2("flux2_klein_4b", **FLUX2),
        Flux2("flux2_dev", **FLUX2),
        ZImage("z_image", *LONGER, GUIDED, {"guidance_scale": 0.0}, 96),
        Qwen21(
            "qwen_image_2_1",
            ("model.output_resolution=64",),
            {"output_resolution": 64, "use_kv_cache": False},
            prompts=("make it snow", "make it rain"),
            size=(64, 32),
        ),
        LongCat("longcat_image_edit", IMAGES, {}, GUIDED, {"guidance_scale": 1.0}, 512),
    )
}


def raw_sample(module, images: Images, folder, index=0, target=(48, 32), prompts=PROMPTS) -> RawBatch:
    """Return a batch of one, read from files as the data modules read them."""
    paths = []
    for place, image in enumerate(images):
        paths.append(folder / f"{index}-{place}.png")
        image.save(paths[-1])
    rules = module.condition_images
    window_of = rules.of_count(len(images)).window
    windows = [rules.fitted(one.size, target) if rules.fits_target else window_of(*one.size) for one in images]
    controls, seen = module.condition_images.load(paths, windows)
    picture = photograph(("coffee", "retina")[index], *target)
    pixels = to_tensor(picture.convert("RGBA") if module.condition_images.alpha else picture)[None]
    return RawBatch([f"sample {index}"], [5 + index], [prompts[index]], pixels, controls, None, [seen])
