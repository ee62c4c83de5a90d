"""Parity with diffusers' QwenImagePipeline, tiny and in float32."""

import pytest
import torch
from diffusers import QwenImagePipeline
from hydra.utils import instantiate

from datamodules.batch import RawBatch
from datamodules.images.decoding import to_tensor
from lightning_modules import flow
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.family import Sampling
from tests.support.commands import compose
from tests.support.losses import losses
from tests.support.pictures import photograph
from tests.support.same_adapters import adapt_like, assert_same_gradients, randomize, stock_shift

PROMPTS = ["a cup of coffee, please", "A cat, and a dog that looks at it"]


@pytest.fixture
def module(repositories):
    """The family's module, with an adapter whose both halves are random, alpha different from rank."""
    settings = ["model=qwen_image", f"model.pretrained_model_name_or_path={repositories['qwen_image']}"]
    cfg = compose("train", *settings, "model.dtype=float32", "adapter.rank=4", "adapter.alpha=6")
    module = instantiate(cfg.model)
    module.configure_model()
    randomize(module.transformer)
    return module


@pytest.fixture
def stock(repositories):
    pipeline = QwenImagePipeline.from_pretrained(repositories["qwen_image"])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("prompt", [*PROMPTS, "", " ", "x" * 505, "long " * 130, "x" * 1100], ids=len)
def test_prompt_embeddings_equal_the_pipelines(module, stock, prompt):
    """Those of prompts that are too long are cut, as in its call."""
    own = module.encode_prompt(module.base.components, prompt, [])
    embeds, mask = stock.encode_prompt(prompt, max_sequence_length=512)
    assert mask is None
    assert own["prompt_embeds_mask"].all()
    assert len(own["prompt_embeds_mask"]) == len(own["prompt_embeds"])
    torch.testing.assert_close(own["prompt_embeds"], embeds[0], rtol=0, atol=1e-5)


def test_prompts_that_are_cut_are_said_once(module, stock, caplog):
    prompts = [*PROMPTS, "", "x" * 600]
    counts, most = module.prompt_tokens(module.base.components, prompts)
    assert counts == [stock.encode_prompt(prompt)[0].shape[1] for prompt in prompts]
    assert most == 512
    raw = RawBatch(["x"] * 4, [0] * 4, prompts, None, [])
    module.encoder(raw)
    module.encoder(raw)
    said = [record.getMessage() for record in caplog.records if "tokens are cut" in record.getMessage()]
    assert said == [f'note: {counts[-1]} tokens are cut to 512: "{"x" * 60}..."']


@pytest.mark.parametrize("size", [(64, 48), (48, 80)])
@pytest.mark.parametrize("true_cfg_scale", [1.0, 4.0])
def test_picture_equals_the_pipelines(module, stock, tmp_path, size, true_cfg_scale):
    save_lora(module.adapter.updates(module.transformer), tmp_path / "pytorch_lora_weights.safetensors", {})
    arguments = {
        "prompt": PROMPTS[0],
        "negative_prompt": "blurry" if true_cfg_scale > 1 else None,
        "true_cfg_scale": true_cfg_scale,
        "num_inference_steps": 4,
        "width": size[0],
        "height": size[1],
        "output_type": "pt",
    }
    unadapted = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    stock.load_lora_weights(tmp_path)
    expected = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    sampling = Sampling(4, None, true_cfg_scale, "blurry")
    raw = RawBatch(["x"], [0], [PROMPTS[0]], None, [])
    encoded = module.encoder(raw, module.sampling_rules.negative_prompt(sampling))
    own = module.sampler.sample(encoded, sampling, size, [7]) / 2 + 0.5
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)
    assert (expected - unadapted).abs().max() > 1e-3


def independent_losses(stock, module, batch):
    """Each sample's loss from the stock pipeline's parts and peft, by the definition of rectified flow."""
    adapt_like(stock.transformer, module.transformer)
    mean, std = (torch.tensor(stock.vae.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    losses = []
    for pixels, draw, prompt in zip(batch.target.split(1), batch.draws, batch.prompts, strict=True):
        latent = stock.vae.encode(pixels.unsqueeze(2)).latent_dist
        shape = latent.mean[0, :, 0].shape
        drawn = flow.sample_noise(
            module.flow.seed, [draw], shape, module.flow.timesteps, stock_shift(stock, latent.mean)
        )
        x0 = (latent.mean + latent.std * drawn.latent_eps.unsqueeze(2) - mean) / std
        eps = drawn.eps.unsqueeze(2)
        x_t, target = (stock._pack_latents(x, 1, *shape) for x in ((1 - drawn.t) * x0 + drawn.t * eps, eps - x0))
        embeds, mask = stock.encode_prompt(prompt)
        predicted = stock.transformer(
            hidden_states=x_t,
            timestep=drawn.t,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, shape[1] // 2, shape[2] // 2)]],
        ).sample
        losses.append((predicted - target).square().mean())
    return torch.stack(losses)


def test_loss_and_gradients_equal_an_independent_computation(module, stock):
    """In a batch of two whose prompt lengths differ."""
    pixels = torch.stack([to_tensor(photograph(name, 48, 32)) for name in ("coffee", "cat")])
    batch = RawBatch(["a", "b"], [5, 6], PROMPTS, pixels, [])
    own = losses(module, module.encoder(batch))
    expected = independent_losses(stock, module, batch)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert (own[0] - own[1]).abs() > 1e-3
    own.mean().backward()
    expected.mean().backward()
    assert_same_gradients(module.transformer, stock.transformer)
