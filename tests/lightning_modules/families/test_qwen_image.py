"""Parity with diffusers' Qwen editing pipelines, tiny and in float32."""

import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from hydra.utils import instantiate
from PIL import Image

from datamodules.batch import RawBatch
from datamodules.images.decoding import size_of_area, to_tensor
from datamodules.images.windows import ConditionImages, Window
from datamodules.pairs import collate_pixels
from lightning_modules import flow
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.family import Sampling
from tests.support.commands import compose
from tests.support.losses import losses
from tests.support.pictures import photograph
from tests.support.same_adapters import adapt_like, assert_same_gradients, randomize, stock_shift
from tests.support.stock_pictures import shrink_condition_images

PROMPTS = ["make it snow", "Turn the cat into a dog, please, and the dog into a cat"]
VAE, CONDITION = 128 * 64, 64 * 64
# The model's name, whether it is Plus, and the (width, height) of a sample's condition images
CASES = [
    ("qwen_image_edit", [(96, 48)]),
    ("qwen_image_edit_plus", [(96, 48)]),
    ("qwen_image_edit_plus", [(96, 48), (64, 64), (40, 90)]),
]
IDS = ["edit", "plus with 1", "plus with 3"]
NAMES = ("astronaut", "chelsea", "rocket")


def build(name, repositories, *overrides):
    """The family's module, with an adapter whose both halves are random, alpha different from rank."""
    condition = VAE if name == "qwen_image_edit" else CONDITION
    cfg = compose(
        "train",
        f"model={name}",
        f"model.pretrained_model_name_or_path={repositories[name]}",
        "model.dtype=float32",
        f"model.vae_image_size={VAE}",
        f"model.condition_image_size={condition}",
        "adapter.rank=4",
        "adapter.alpha=6",
        *overrides,
    )
    module = instantiate(cfg.model)
    module.configure_model()
    randomize(module.transformer)
    return module


def stock_pipeline(name, repositories, monkeypatch):
    """As diffusers loads it, but that condition images are resized to fewer pixels, to save time."""
    shrink_condition_images(monkeypatch, VAE, CONDITION)
    cls = QwenImageEditPlusPipeline if name == "qwen_image_edit_plus" else QwenImageEditPipeline
    pipeline = cls.from_pretrained(repositories[name])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def condition_images(sizes, shift=0):
    return [photograph(NAMES[(i + shift) % 3], *size) for i, size in enumerate(sizes)]


def raw_sample(module, images, tmp_path, number=0, target=(48, 32)) -> RawBatch:
    """A batch of one, read from files as the data modules do."""
    paths = []
    for i, image in enumerate(images):
        paths.append(tmp_path / f"{number}-{i}.png")
        image.save(paths[-1])
    windows = [Window.whole(module.condition_images.size(*image.size)) for image in images]
    controls, seen = module.condition_images.load(paths, windows)
    pixels = to_tensor(photograph(NAMES[number], *target))[None]
    return RawBatch([f"sample {number}"], [5 + number], [PROMPTS[number]], pixels, controls, None, [seen])


@pytest.mark.parametrize("size", [(1024, 1024), (640, 480), (1200, 300), (333, 1999), (16, 16)])
@pytest.mark.parametrize("area", [1024 * 1024, 384 * 384])
def test_sizes_are_the_pipelines(size, area):
    expected = pipeline_qwenimage_edit_plus.calculate_dimensions(area, size[0] / size[1])
    assert size_of_area(*size, area) == expected
    assert ConditionImages(vae_image_size=area).size(*size) == expected


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_prompt_embeddings_equal_the_pipelines(name, sizes, repositories, monkeypatch, tmp_path):
    module = build(name, repositories)
    stock = stock_pipeline(name, repositories, monkeypatch)
    images = condition_images(sizes)
    seen = raw_sample(module, images, tmp_path).prompt_images[0]
    area = VAE if name == "qwen_image_edit" else CONDITION
    resized = [image.resize(size_of_area(*image.size, area), Image.Resampling.LANCZOS) for image in images]
    for prompt in (*PROMPTS, ""):
        own = module.encode_prompt(module.base.components, prompt, seen)
        embeds, mask = stock._get_qwen_prompt_embeds(prompt, resized)
        torch.testing.assert_close(own["prompt_embeds"], embeds[0], rtol=0, atol=1e-5)
        assert torch.equal(own["prompt_embeds_mask"], mask[0])
    others = condition_images(sizes, shift=1)
    other = module.encode_prompt(module.base.components, "", raw_sample(module, others, tmp_path).prompt_images[0])
    assert (other["prompt_embeds"] - own["prompt_embeds"]).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_image_latents_equal_the_pipelines(name, sizes, repositories, monkeypatch, tmp_path):
    module = build(name, repositories)
    stock = stock_pipeline(name, repositories, monkeypatch)
    images = condition_images(sizes)
    raw = raw_sample(module, images, tmp_path)
    for control, image in zip(raw.controls, images, strict=True):
        width, height = size_of_area(*image.size, VAE)
        expected = stock._encode_vae_image(stock.image_processor.preprocess(image, height, width).unsqueeze(2), None)
        own = module.normalize(module.encode_pixels(module.base.components["vae"], control)[0])
        torch.testing.assert_close(own.unsqueeze(2), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("true_cfg_scale", [1.0, 4.0])
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_edited_picture_equals_the_pipelines(name, sizes, true_cfg_scale, repositories, monkeypatch, tmp_path):
    module = build(name, repositories)
    stock = stock_pipeline(name, repositories, monkeypatch)
    save_lora(module.adapter.updates(module.transformer), tmp_path / "pytorch_lora_weights.safetensors", {})
    images = condition_images(sizes)
    arguments = {
        "image": images if name == "qwen_image_edit_plus" else images[0],
        "prompt": PROMPTS[0],
        "negative_prompt": "blurry" if true_cfg_scale > 1 else None,
        "true_cfg_scale": true_cfg_scale,
        "num_inference_steps": 4,
        "width": 64,
        "height": 48,
        "output_type": "pt",
    }
    unadapted = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    stock.load_lora_weights(tmp_path)
    expected = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    sampling = Sampling(4, None, true_cfg_scale, "blurry")
    encoded = module.encoder(raw_sample(module, images, tmp_path), module.sampling_rules.negative_prompt(sampling))
    own = module.sampler.sample(encoded, sampling, (64, 48), [7]) / 2 + 0.5
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)
    assert (expected - unadapted).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
@pytest.mark.slow
def test_edited_picture_equals_the_pipelines_at_their_own_sizes(name, repositories, tmp_path):
    """One megapixel for the autoencoder, as everybody predicts: nothing here is made smaller."""
    module = instantiate(
        compose("train", f"model={name}", f"model.pretrained_model_name_or_path={repositories[name]}").model,
        dtype="float32",
    )
    module.configure_model()
    cls = QwenImageEditPlusPipeline if name == "qwen_image_edit_plus" else QwenImageEditPipeline
    stock = cls.from_pretrained(repositories[name])
    images = condition_images([(90, 70)])
    expected = stock(
        image=images if name == "qwen_image_edit_plus" else images[0],
        prompt=PROMPTS[0],
        true_cfg_scale=1.0,
        num_inference_steps=2,
        width=64,
        height=48,
        output_type="pt",
        generator=torch.Generator().manual_seed(7),
    ).images
    encoded = module.encoder(raw_sample(module, images, tmp_path))
    own = module.sampler.sample(encoded, Sampling(2, None, 1.0, None), (64, 48), [7]) / 2 + 0.5
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)


def independent_losses(stock, module, name, samples):
    """Each sample's loss from the stock pipeline's parts and peft, by the definition of rectified flow."""
    transformer, vae = stock.transformer, stock.vae
    adapt_like(transformer, module.transformer)
    mean, std = (torch.tensor(vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    losses = []
    for raw, images in samples:
        latent = vae.encode(raw.target.unsqueeze(2)).latent_dist
        shape = latent.mean[0, :, 0].shape
        drawn = flow.sample_noise(
            module.flow.seed, raw.draws, shape, module.flow.timesteps, stock_shift(stock, latent.mean)
        )
        x0 = (latent.mean + latent.std * drawn.latent_eps.unsqueeze(2) - mean) / std
        eps = drawn.eps.unsqueeze(2)
        controls = []
        for image in images:
            width, height = size_of_area(*image.size, VAE)
            pixels = stock.image_processor.preprocess(image, height, width).unsqueeze(2)
            controls.append(stock._encode_vae_image(pixels, None))
        latents = [(1 - drawn.t) * x0 + drawn.t * eps, *controls]
        area = VAE if name == "qwen_image_edit" else CONDITION
        resized = [image.resize(size_of_area(*image.size, area), Image.Resampling.LANCZOS) for image in images]
        embeds, mask = stock.encode_prompt(raw.prompts[0], resized)
        predicted = transformer(
            hidden_states=torch.cat([stock._pack_latents(x, 1, x.shape[1], *x.shape[-2:]) for x in latents], 1),
            timestep=drawn.t,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, x.shape[-2] // 2, x.shape[-1] // 2) for x in latents]],
        ).sample
        target = stock._pack_latents(eps - x0, 1, shape[0], *shape[-2:])
        losses.append((predicted[:, : target.shape[1]] - target).square().mean())
    return torch.stack(losses)


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=IDS)
def test_loss_and_gradients_equal_an_independent_computation(name, sizes, repositories, monkeypatch, tmp_path):
    """In a batch of two whose condition images and prompt lengths differ: neither meets the other's, nor padding."""
    module = build(name, repositories)
    stock = stock_pipeline(name, repositories, monkeypatch)
    images = [condition_images(sizes, shift=number) for number in range(2)]
    raws = [raw_sample(module, images[number], tmp_path, number) for number in range(2)]
    batch = collate_pixels(raws)
    own = losses(module, module.encoder(batch))
    expected = independent_losses(stock, module, name, list(zip(raws, images, strict=True)))
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert (own[0] - own[1]).abs() > 1e-3
    own.mean().backward()
    expected.mean().backward()
    assert_same_gradients(module.transformer, stock.transformer)


def test_padding_is_masked(repositories, tmp_path):
    """What stands in the padding has no influence; without the mask it would have."""
    module = build("qwen_image_edit", repositories)
    raws = [raw_sample(module, condition_images([(96, 48)]), tmp_path, number) for number in range(2)]
    latents = module.encoder(collate_pixels(raws))
    length = int(latents.prompt["prompt_embeds_mask"][0].sum())
    assert length < latents.prompt["prompt_embeds"].shape[1]
    before = losses(module, latents)
    latents.prompt["prompt_embeds"][0, length:] = 100.0
    torch.testing.assert_close(losses(module, latents), before, rtol=1e-5, atol=1e-6)
    latents.prompt["prompt_embeds_mask"][0, length:] = 1
    assert (losses(module, latents) - before)[0].abs() > 1e-4


def test_dropped_captions_keep_the_image(repositories, tmp_path):
    """Each sample's empty prompt is encoded with its own image, at whatever length it has."""
    module = build("qwen_image_edit", repositories)
    raws = [raw_sample(module, condition_images([(96, 48)], shift=number), tmp_path, number) for number in range(2)]
    batch = collate_pixels(raws)
    captioned = losses(module, module.encoder(batch))
    encoded = module.encoder(batch, "")
    batch.prompts = ["", ""]
    uncaptioned = losses(module, module.encoder(batch))
    assert (captioned - uncaptioned).abs().min() > 1e-6
    drawn = flow.sample_noise(module.flow.seed, batch.draws, torch.Size([1, 2, 2]), module.flow.timesteps, 1.0).dropout
    for rate in (1.0, float(drawn.min() + drawn.max()) / 2):  # both, and one of the two
        module.flow.caption_dropout_rate = rate
        expected = torch.where(drawn < rate, uncaptioned, captioned)
        torch.testing.assert_close(losses(module, encoded), expected, rtol=1e-5, atol=1e-6)
