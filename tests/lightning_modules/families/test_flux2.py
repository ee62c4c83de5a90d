"""Parity with diffusers' FLUX.2 pipelines, tiny and in float32."""

import json
import logging
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from hydra.utils import instantiate

from datamodules.batch import RawBatch
from datamodules.images.decoding import to_tensor
from datamodules.images.windows import ConditionImages, Window
from lightning_modules import flow
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.execution.blocks import blocks
from lightning_modules.families.flux2.denoise import empirical_mu, image_ids, text_ids
from lightning_modules.family import Sampling
from lightning_modules.patches import pack, unpack
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.losses import losses
from tests.support.pictures import photograph
from tests.support.same_adapters import adapt_like, assert_same_gradients, randomize, stock_shift

PROMPTS = ["make it snow", "Turn the [IMG] cat into a dog, please"]
KLEIN, DEV = "flux2_klein_4b", "flux2_dev"
BOTH = pytest.mark.parametrize("name", [KLEIN, DEV])
LENGTH = 64
# (width, height) of references: some whose sides are no multiples of 16
REFERENCES = [[], [(96, 75)], [(96, 75), (64, 112)]]
IDS = ["no reference", "one", "two"]


def build(name, repository, *overrides):
    """The family's module, with an adapter whose both halves are random, alpha different from rank."""
    settings = [f"model.pretrained_model_name_or_path={repository}", f"model.max_sequence_length={LENGTH}"]
    more = ["model.dtype=float32", "adapter.rank=4", "adapter.alpha=6", *overrides]
    module = instantiate(compose("train", f"model={name}", *settings, *more).model)
    module.configure_model()
    randomize(module.transformer)
    return module


def stock_pipeline(repository, dtype=torch.float32):
    pipeline = DiffusionPipeline.from_pretrained(repository, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def references(sizes, shift=0):
    names = ("astronaut", "chelsea", "rocket")
    return [photograph(names[(number + shift) % 3], *size) for number, size in enumerate(sizes)]


def raw_sample(module, images, number=0, target=(48, 32)) -> RawBatch:
    """A batch of one, as the data modules make it of files."""
    windows = [module.condition_images.window(*image.size) for image in images]
    controls = [to_tensor(window.of(image))[None] for window, image in zip(windows, images, strict=True)]
    pixels = to_tensor(photograph(("coffee", "retina")[number], *target))[None]
    return RawBatch([f"sample {number}"], [5 + number], [PROMPTS[number]], pixels, controls)


def both_samples(raws) -> RawBatch:
    first, second = raws
    controls = [torch.cat(pair) for pair in zip(first.controls, second.controls, strict=True)]
    target = torch.cat([first.target, second.target])
    prompts = [*first.prompts, *second.prompts]
    return RawBatch([*first.keys, *second.keys], [*first.draws, *second.draws], prompts, target, controls)


class Seen(Exception):
    """What the stock pipeline would encode."""


def preprocessed(stock, image):
    """A reference as the stock pipeline's autoencoder sees it."""

    def stop(images, **_):
        raise Seen(images)

    stock.prepare_image_latents = stop
    with pytest.raises(Seen) as seen:
        stock(image=image, prompt="x", width=16, height=16, max_sequence_length=8, num_inference_steps=1)
    return seen.value.args[0][0]


@BOTH
def test_prompt_embeddings_equal_the_pipelines(name, repositories):
    module, stock = build(name, repositories[name]), stock_pipeline(repositories[name])
    seen = []
    for prompt in (*PROMPTS, ""):
        own = module.encode_prompt(module.base.components, prompt, [])["prompt_embeds"]
        embeds, ids = stock.encode_prompt(prompt, max_sequence_length=LENGTH)
        torch.testing.assert_close(own, embeds[0], rtol=0, atol=1e-5)
        assert torch.equal(text_ids(LENGTH, torch.device("cpu")), ids[0])
        seen.append(own)
    assert min((seen[0] - seen[1]).abs().max(), (seen[0] - seen[2]).abs().max()) > 1
    assert module.prompt_shapes(module.base.source.config(), "", []) == {"prompt_embeds": seen[0].shape}


@BOTH
def test_prompt_that_is_cut_is_said(name, repositories, caplog, monkeypatch):
    module = build(name, repositories[name])
    monkeypatch.setattr(logging.getLogger("retouch"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("retouch"), "propagate", False)
    around = module.prompt_tokens(module.base.components, [""])[0][0]
    fits, cut = ("x" * (LENGTH + more - around) for more in (0, 1))
    assert module.prompt_tokens(module.base.components, [fits, cut]) == ([LENGTH, LENGTH + 1], LENGTH)
    for prompt in (fits, cut, cut):
        module.encoder._encode_prompt(prompt, [])
    [note] = [record.getMessage() for record in caplog.records if "cut" in record.getMessage()]
    assert note.startswith(f"note: {LENGTH + 1} tokens are cut to {LENGTH} (model.max_sequence_length)")


@pytest.mark.parametrize("size", [(96, 75), (65, 127), (1024, 1024), (1536, 1536), (2000, 777), (1183, 1400)])
def test_references_are_cropped_and_shrunk_as_in_the_pipeline(size, repositories):
    image = photograph("chelsea", *size)
    window = build(KLEIN, repositories[KLEIN]).condition_images.window(*size)
    expected = preprocessed(stock_pipeline(repositories[KLEIN]), image)[0]
    own = to_tensor(window.of(image))
    assert own.shape == expected.shape
    if size[0] * size[1] <= 1024**2:
        assert torch.equal(own, expected)
    # What is shrunk is resized in one go with the crop: a few pixels round otherwise, by two steps of 8 bits at most.
    torch.testing.assert_close(own, expected, rtol=0, atol=4 / 255 + 1e-6)
    assert (own != expected).float().mean() < 5e-4


def test_windows_of_larger_references_are_narrowed_in_their_proportions():
    images = ConditionImages(most_area=64 * 64, crops=True)
    window = Window((200, 160), (10, 20, 170, 116), (160, 96))
    narrowed = images.narrowed(window)
    assert narrowed.size == images.size(160, 96) == (80, 48)
    across, down = (seen / side for seen, side in zip(narrowed.seen, narrowed.size, strict=True))
    assert across == pytest.approx(down, rel=0.02)
    center = (narrowed.box[0] + narrowed.box[2], narrowed.box[1] + narrowed.box[3])
    assert center == (180, 136)
    small = Window((64, 48), (0, 0, 64, 48), (64, 48))
    assert images.narrowed(small) == small


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@BOTH
def test_tokens_of_references_are_the_pipelines_bit_by_bit(name, dtype, repositories):
    module = build(name, repositories[name], f"model.dtype={str(dtype)[6:]}")
    stock = stock_pipeline(repositories[name], dtype)
    controls = raw_sample(module, references(REFERENCES[2])).controls
    controls = [control.to(dtype, memory_format=torch.channels_last) for control in controls]
    tokens, ids = stock.prepare_image_latents(controls, 1, None, "cpu", dtype)
    vae = module.base.components["vae"]
    with torch.no_grad():
        own = [module.normalize(module.encode_pixels(vae, control)[0]) for control in controls]
    assert torch.equal(torch.cat([pack(latents) for latents in own], 1), tokens)
    assert torch.equal(image_ids(own, first=1)[None], ids)
    target = stock.prepare_latents(1, 4, 64, 48, dtype, "cpu", torch.Generator().manual_seed(0))
    assert torch.equal(image_ids([unpack(target[0], 8, 6)])[None], target[1])


def edited(module, stock, folder, sizes, guidance):
    """Our picture and the stock pipeline's, with the LoRA and without."""
    weights = folder / "pytorch_lora_weights.safetensors"
    save_lora(module.adapter.updates(module.transformer), weights, {})
    images = references(sizes)
    call = {"guidance_scale": guidance, "num_inference_steps": 4, "width": 64, "height": 48}
    call |= {"image": images or None, "prompt": PROMPTS[0], "max_sequence_length": LENGTH, "output_type": "pt"}
    unadapted = stock(**call, generator=torch.Generator().manual_seed(7)).images
    stock.load_lora_weights(folder)
    expected = stock(**call, generator=torch.Generator().manual_seed(7)).images
    sampling = Sampling(4, guidance, None, None)
    raw = raw_sample(module, images)
    raw.target = None
    encoded = module.encoder(raw, module.sampling_rules.negative_prompt(sampling))
    own = module.sampler.sample(encoded, sampling, (64, 48), [7]) / 2 + 0.5
    return own.clamp(0, 1), expected, unadapted


@pytest.mark.parametrize(("name", "guidance"), first(1, [(KLEIN, 4.0), (KLEIN, 1.0), (DEV, 2.5)]))
@pytest.mark.parametrize("sizes", REFERENCES, ids=IDS)
def test_edited_picture_equals_the_pipelines(name, guidance, sizes, repositories, tmp_path):
    module, stock = build(name, repositories[name]), stock_pipeline(repositories[name])
    own, expected, unadapted = edited(module, stock, tmp_path, sizes, guidance)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    assert (expected - unadapted).abs().max() > 1e-3


def test_distilled_model_is_not_guided(repositories, tmp_path):
    """As `is_distilled` of its repository says, whatever the scale."""
    distilled = shutil.copytree(repositories[KLEIN], tmp_path / "distilled")
    index = json.loads((distilled / "model_index.json").read_text())
    (distilled / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    pictures = {}
    for repository, guidance in ((distilled, 4.0), (repositories[KLEIN], 1.0), (repositories[KLEIN], 4.0)):
        module, stock = build(KLEIN, repository), stock_pipeline(repository)
        own, expected, _ = edited(module, stock, tmp_path, REFERENCES[1], guidance)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
        pictures[repository, guidance] = own
    alike, unguided, guided = pictures.values()
    assert torch.equal(alike, unguided)
    assert (alike - guided).abs().max() > 1e-3


def independent_losses(stock, module, samples):
    """Each sample's loss from the stock pipeline's parts and peft, by the definition of rectified flow."""
    transformer, vae = stock.transformer, stock.vae
    adapt_like(transformer, module.transformer)
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    losses = []
    for raw, images in samples:
        latent = vae.encode(raw.target).latent_dist
        drawn = flow.sample_noise(
            module.flow.seed, raw.draws, latent.mean.shape[1:], module.flow.timesteps, stock_shift(stock, latent.mean)
        )
        x0 = (stock._patchify_latents(latent.mean) - mean) / std
        eps = stock._patchify_latents(drawn.eps)
        x_t = (1 - drawn.t) * x0 + drawn.t * eps
        tokens, ids = [stock._pack_latents(x_t)], [stock._prepare_latent_ids(x_t)]
        pixels = [
            stock.image_processor.preprocess(one, one.height // 16 * 16, one.width // 16 * 16, "crop") for one in images
        ]
        if images:
            more = stock.prepare_image_latents(pixels, 1, None, "cpu", torch.float32)
            tokens, ids = [*tokens, more[0]], [*ids, more[1]]
        embeds, words = stock.encode_prompt(raw.prompts[0], max_sequence_length=LENGTH)
        predicted = transformer(
            hidden_states=torch.cat(tokens, 1),
            timestep=drawn.t,
            guidance=torch.ones(1) if transformer.config.guidance_embeds else None,
            encoder_hidden_states=embeds,
            txt_ids=words,
            img_ids=torch.cat(ids, 1),
        ).sample[:, : tokens[0].shape[1]]
        losses.append((predicted - stock._pack_latents(eps - x0)).square().mean())
    return torch.stack(losses)


@BOTH
@pytest.mark.parametrize("sizes", REFERENCES, ids=IDS)
def test_loss_and_gradients_equal_an_independent_computation(name, sizes, repositories):
    """In a batch of two whose references and prompts differ."""
    module, stock = build(name, repositories[name]), stock_pipeline(repositories[name])
    images = [references(sizes, shift=number) for number in range(2)]
    raws = [raw_sample(module, images[number], number) for number in range(2)]
    own = losses(module, module.encoder(both_samples(raws)))
    expected = independent_losses(stock, module, list(zip(raws, images, strict=True)))
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert (own[0] - own[1]).abs() > 1e-3
    own.mean().backward()
    expected.mean().backward()
    assert_same_gradients(module.transformer, stock.transformer)


@pytest.mark.parametrize("tokens", [16, 4096, 4300, 4301, 9000])
@pytest.mark.parametrize("steps", [4, 10, 50, 200])
def test_shift_of_the_timesteps_is_the_pipelines(tokens, steps):
    assert empirical_mu({}, tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)


@BOTH
def test_default_targets_are_in_every_block(name, repositories):
    """Four layers of a double block, and both of a single one."""
    module = build(name, repositories[name])
    adapted = list(lora_layers(module.transformer))
    for block in blocks(module.transformer):
        inside = [layer for layer in adapted if layer.startswith(f"{block}.")]
        assert len(inside) == (2 if block.startswith("single") else 4)
    assert len(adapted) == 2 * 4 + 2 * 2
