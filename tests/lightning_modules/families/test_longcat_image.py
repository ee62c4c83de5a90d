"""Parity with diffusers' LongCatImageEditPipeline, tiny and in float32."""

import logging

import numpy as np
import pytest
import torch
from diffusers import LongCatImageEditPipeline
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import prepare_pos_ids
from hydra.utils import instantiate

from datamodules.batch import RawBatch
from datamodules.errors import UserError
from datamodules.images.decoding import to_tensor
from datamodules.images.windows import Window
from datamodules.pairs import collate_pixels
from lightning_modules import flow
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.families.longcat_image.conditions import HalvedForText
from lightning_modules.families.longcat_image.denoise import CONTROL, TARGET, image_ids, text_ids
from lightning_modules.family import Sampling
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.losses import losses
from tests.support.pictures import photograph
from tests.support.same_adapters import adapt_like, assert_same_gradients, randomize
from tests.support.stock_pictures import shrink_condition_images

PROMPTS = ["make it snow", "Write \"Good day\" on the cat's sign, don't add 'more' to it"]
VAE = 128 * 64
# (width, height) of condition images, also such that are not what the autoencoder sees
SIZES = [(96, 48), (50, 71), (64, 64), (33, 100)]
LENGTH = 512
NAMES = ("astronaut", "chelsea", "rocket")


@pytest.fixture
def module(repositories):
    """The family's module, with an adapter whose both halves are random, alpha different from rank."""
    settings = ["model=longcat_image_edit", f"model.pretrained_model_name_or_path={repositories['longcat_image_edit']}"]
    settings += ["model.dtype=float32", f"model.vae_image_size={VAE}", "adapter.rank=4", "adapter.alpha=6"]
    module = instantiate(compose("train", *settings).model)
    module.configure_model()
    randomize(module.transformer)
    return module


@pytest.fixture
def stock(repositories, monkeypatch):
    """As diffusers loads it, but that condition images are resized to fewer pixels, to save time."""
    shrink_condition_images(monkeypatch, VAE, VAE)
    pipeline = LongCatImageEditPipeline.from_pretrained(repositories["longcat_image_edit"])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def raw_sample(module, image, tmp_path, number=0, target=(48, 32)) -> RawBatch:
    """A batch of one, read from files as the data modules do."""
    path = tmp_path / f"{number}.png"
    image.save(path)
    controls, seen = module.condition_images.load([path], [module.condition_images.window(*image.size)])
    pixels = to_tensor(photograph(NAMES[number], *target))[None]
    return RawBatch([f"sample {number}"], [5 + number], [PROMPTS[number]], pixels, controls, None, [seen])


def as_the_pipeline_sees(stock, image):
    """For the autoencoder, and for the text encoder: the first lines of its call."""
    width, height = pipeline_longcat_image_edit.calculate_dimensions(None, image.size[0] * 1.0 / image.size[1])
    resized = stock.image_processor.resize(image, height, width)
    small = stock.image_processor.resize(resized, height // 2, width // 2)
    return stock.image_processor.preprocess(resized, height, width), small


@pytest.mark.parametrize("area", [1024 * 1024, VAE])
@pytest.mark.parametrize("size", [(1024, 1024), (640, 480), (1200, 300), (333, 1999), (16, 16), (1999, 1201), (5, 7)])
def test_sizes_are_the_pipelines(size, area):
    expected = pipeline_longcat_image_edit.calculate_dimensions(area, size[0] * 1.0 / size[1])
    assert HalvedForText(vae_image_size=area).size(*size) == expected


def test_every_size_is_the_pipelines():
    images = HalvedForText(vae_image_size=1024 * 1024)
    for width, height in torch.randint(16, 4000, (5000, 2), generator=torch.Generator().manual_seed(1)).tolist():
        expected = pipeline_longcat_image_edit.calculate_dimensions(1024 * 1024, width * 1.0 / height)
        assert images.size(width, height) == expected


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_the_pipelines(module, stock, tmp_path, size):
    """Of both encoders; the text encoder's are the same whether the file is read for it alone or not."""
    image = photograph("chelsea", *size)
    raw = raw_sample(module, image, tmp_path)
    pixels, small = as_the_pipeline_sees(stock, image)
    torch.testing.assert_close(raw.controls[0], pixels, rtol=0, atol=1e-6)
    [[seen]] = raw.prompt_images
    assert np.array_equal(seen.permute(1, 2, 0), np.asarray(small))
    [alone] = module.condition_images.for_text([tmp_path / "0.png"])
    assert torch.equal(alone, seen)


def test_text_encoder_sees_the_same_part_of_a_picture_as_the_autoencoder(module, tmp_path):
    photograph("chelsea", 200, 100).save(tmp_path / "x.png")
    crop = Window((160, 80), (20, 0, 148, 64), (128, 64), flipped=True)
    [[pixels]], [seen] = module.condition_images.load([tmp_path / "x.png"], [crop])
    [[whole]], _ = module.condition_images.load([tmp_path / "x.png"], [Window.whole((128, 64))])
    assert seen.shape == (3, 32, 64)
    halved = torch.nn.functional.interpolate(pixels[None], (32, 64), mode="area")[0]
    assert ((halved + 1) * 127.5 - seen).abs().mean() < 4
    assert (whole - pixels).abs().mean() > 0.1


@pytest.mark.parametrize("size", SIZES)
def test_prompt_embeddings_equal_the_pipelines(module, stock, tmp_path, size):
    image = photograph("astronaut", *size)
    [seen] = raw_sample(module, image, tmp_path).prompt_images
    _, small = as_the_pipeline_sees(stock, image)
    prompts = [*PROMPTS, "", " ", "'", '""', "it's 'a\"b' \"", "x" * LENGTH]
    embeddings = [module.encode_prompt(module.base.components, prompt, seen)["prompt_embeds"] for prompt in prompts]
    for prompt, own in zip(prompts, embeddings, strict=True):
        torch.testing.assert_close(own, stock._encode_prompt([prompt], small)[0], rtol=0, atol=1e-5)
    assert min((embeddings[0] - other).abs().max() for other in embeddings[1:]) > 1e-3
    other = raw_sample(module, photograph("rocket", *size), tmp_path).prompt_images[0]
    changed = module.encode_prompt(module.base.components, PROMPTS[0], other)["prompt_embeds"]
    assert (changed - embeddings[0]).abs().max() > 1e-3


def test_quoted_words_are_read_letter_by_letter_as_the_pipeline_reads_them(module, stock, tmp_path, monkeypatch):
    asked = []
    tokenizer = type(stock.tokenizer)
    call = tokenizer.__call__
    monkeypatch.setattr(
        tokenizer, "__call__", lambda self, text, **more: asked.append(text) or call(self, text, **more)
    )
    _, small = as_the_pipeline_sees(stock, photograph("cat", 64, 64))
    stock._encode_prompt(["write 'no' on the cat's ear"], small)
    *prompt, template, _ = asked
    assert "editing expert" in template
    asked.clear()
    lengths, most = module.prompt_tokens(module.base.components, ["write 'no' on the cat's ear"])
    assert asked == prompt == ["write ", "'", "n", "o", "'", " on the cat's ear"]
    assert (lengths, most) == ([27], LENGTH)


def test_prompt_that_is_too_long_is_cut_and_said(module, stock, tmp_path, caplog, monkeypatch):
    """Where the pipeline fails."""
    monkeypatch.setattr(logging.getLogger("retouch"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("retouch"), "propagate", False)
    image = photograph("astronaut", 96, 48)
    [seen] = raw_sample(module, image, tmp_path).prompt_images
    _, small = as_the_pipeline_sees(stock, image)
    long = "ab" * 300
    with pytest.raises(TypeError):
        stock._encode_prompt([long], small)
    for _ in range(2):
        own = module.encoder._encode_prompt(long, seen)["prompt_embeds"]
    torch.testing.assert_close(own, stock._encode_prompt([long[:LENGTH]], small)[0], rtol=0, atol=1e-5)
    said = [text for text in caplog.messages if text.startswith("note:")]
    assert said == [f'note: 600 tokens are cut to 512: "{long[:60]}..."']


def test_shapes_of_prompts_are_known_without_weights(module, tmp_path):
    image = photograph("astronaut", 1200, 800)
    big = HalvedForText(1, 1, vae_image_size=512 * 512)
    [own] = module.prompt_shapes({"joint_attention_dim": 32}, PROMPTS[0], [big.size(*image.size)]).values()
    image.save(tmp_path / "x.png")
    seen = big.for_text([tmp_path / "x.png"])
    assert module.encode_prompt(module.base.components, PROMPTS[0], seen)["prompt_embeds"].shape == own


def test_images_of_several_sizes_are_no_batch(module, tmp_path):
    """Their texts are of several lengths, and nothing of them is masked."""
    samples = [raw_sample(module, photograph("cat", *size), tmp_path) for size in ((64, 64), (200, 20))]
    samples[1].controls = samples[0].controls  # which could not even be collated
    with pytest.raises(UserError, match=r"a batch has prompt_embeds of \[5\d\d, 5\d\d\] tokens.* data.batch_size=1"):
        module.encoder(collate_pixels(samples))


def test_position_ids_are_the_pipelines(module):
    latents = torch.zeros(1, 16, 6, 4)
    assert torch.equal(text_ids(11, latents.device), prepare_pos_ids(0, "text", (0, 0), 11))
    for modality in (TARGET, CONTROL):
        expected = prepare_pos_ids(modality, "image", (11, 11), height=3, width=2)
        assert torch.equal(image_ids(latents, modality, 11), expected)


@pytest.mark.parametrize("size", SIZES)
def test_image_latents_equal_the_pipelines(module, stock, tmp_path, size):
    image = photograph("coffee", *size)
    [control] = raw_sample(module, image, tmp_path).controls
    expected = stock._encode_vae_image(as_the_pipeline_sees(stock, image)[0], None)
    own = module.normalize(module.encode_pixels(module.base.components["vae"], control)[0])
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("guidance_scale", first(1, [4.5, 1.0]))
@pytest.mark.parametrize("size", SIZES)
def test_edited_picture_equals_the_pipelines(module, stock, tmp_path, size, guidance_scale):
    save_lora(module.adapter.updates(module.transformer), tmp_path / "pytorch_lora_weights.safetensors", {})
    image = photograph("chelsea", *size)
    arguments = {
        "image": image,
        "prompt": PROMPTS[0],
        "negative_prompt": "blurry",
        "guidance_scale": guidance_scale,
        "num_inference_steps": 4,
        "output_type": "pt",
    }
    unadapted = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    stock.transformer.load_lora_adapter(tmp_path, prefix="transformer", use_safetensors=True)
    expected = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    sampling = Sampling(4, guidance_scale, None, "blurry")
    raw = raw_sample(module, image, tmp_path)
    encoded = module.encoder(raw, module.sampling_rules.negative_prompt(sampling))
    own = module.sampler.sample(encoded, sampling, module.condition_images.size(*size), [7]) / 2 + 0.5
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)
    assert (expected - unadapted).abs().max() > 1e-3


def test_pictures_of_any_size_are_made_together(module, tmp_path):
    """Two seeds at once, of a size that the stock pipeline does not make from this image, as each alone."""
    sampling = Sampling(3, 4.5, None, None)
    encoded = module.encoder(raw_sample(module, photograph("cat", 96, 48), tmp_path), "")
    twice = module.encoder(collate_pixels([raw_sample(module, photograph("cat", 96, 48), tmp_path)] * 2), "")
    together = module.sampler.sample(twice, sampling, (80, 32), [7, 8])
    alone = torch.cat([module.sampler.sample(encoded, sampling, (80, 32), [seed]) for seed in (7, 8)])
    assert together.shape == (2, 3, 32, 80)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert (together[0] - together[1]).abs().max() > 0.1


def independent_losses(stock, module, samples):
    """Each sample's loss from the stock pipeline's parts and peft, by the definition of rectified flow."""
    adapt_like(stock.transformer, module.transformer)
    shift, factor = stock.vae.config.shift_factor, stock.vae.config.scaling_factor
    losses = []
    for raw, image in samples:
        latent = stock.vae.encode(raw.target).latent_dist
        drawn = flow.sample_noise(module.flow.seed, raw.draws, latent.mean.shape[1:], module.flow.timesteps, 1.0)
        x0 = (latent.mean + latent.std * drawn.latent_eps - shift) * factor
        pixels, small = as_the_pipeline_sees(stock, image)
        embeds, txt_ids = stock.encode_prompt(raw.prompts, small)
        shape = 1, 16, *raw.target.shape[-2:], torch.float32, embeds.shape[1], torch.device("cpu"), None
        _, _, target_ids, _ = stock.prepare_latents(None, *shape)
        height, width = pixels.shape[-2:]
        _, control, _, control_ids = stock.prepare_latents(pixels, 1, 16, height, width, *shape[4:])
        noisy, target = (
            stock._pack_latents(x, 1, *x.shape[1:]) for x in ((1 - drawn.t) * x0 + drawn.t * drawn.eps, drawn.eps - x0)
        )
        predicted = stock.transformer(
            hidden_states=torch.cat([noisy, control], dim=1),
            timestep=drawn.t,
            encoder_hidden_states=embeds,
            txt_ids=txt_ids,
            img_ids=torch.cat([target_ids, control_ids]),
        ).sample
        losses.append((predicted[:, : target.shape[1]] - target).square().mean())
    return torch.stack(losses)


@pytest.mark.parametrize("size", [(96, 48), (50, 71)])
def test_loss_and_gradients_equal_an_independent_computation(module, stock, tmp_path, size):
    """In a batch of two whose images and prompts differ."""
    images = [photograph(name, *size) for name in NAMES[:2]]
    raws = [raw_sample(module, images[number], tmp_path, number) for number in range(2)]
    own = losses(module, module.encoder(collate_pixels(raws)))
    expected = independent_losses(stock, module, list(zip(raws, images, strict=True)))
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert (own[0] - own[1]).abs() > 1e-3
    own.mean().backward()
    expected.mean().backward()
    assert_same_gradients(module.transformer, stock.transformer)


def test_image_keeps_no_size_of_its_own():
    with pytest.raises(Exception, match=r"model\.vae_image_size=null: LongCat resizes every condition image"):
        instantiate(compose("train", "model=longcat_image_edit", "model.vae_image_size=null").model)
