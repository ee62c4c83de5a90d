"""Parity with diffusers' FluxKontextPipeline, tiny and in float32."""

import pytest
import torch
from hydra.utils import instantiate

from datamodules.batch import RawBatch
from datamodules.images.decoding import to_tensor
from lightning_modules import flow
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.families.flux.denoise import position_ids
from lightning_modules.family import Sampling
from lightning_modules.patches import pack, unpack
from tests.support.commands import compose
from tests.support.losses import losses
from tests.support.pictures import photograph
from tests.support.same_adapters import adapt_like, assert_same_gradients, randomize

PROMPTS = ["make it snow", "Turn the cat into a dog, please"]


@pytest.fixture
def module(tiny):
    """The family's module, with an adapter whose both halves are random, alpha different from rank."""
    settings = [f"model.pretrained_model_name_or_path={tiny}", "model.max_sequence_length=64"]
    module = instantiate(compose("train", *settings, "adapter.rank=4", "adapter.alpha=6").model)
    module.configure_model()
    randomize(module.transformer)
    return module


def raw_batch(names=("astronaut", "coffee"), size=(48, 32), control_sizes=((48, 32),)) -> RawBatch:
    def images(width, height):
        return torch.stack([to_tensor(photograph(name, width, height)) for name in names])

    return RawBatch(
        keys=list(names),
        draws=list(range(5, 5 + len(names))),
        prompts=PROMPTS[: len(names)],
        target=images(*size).flip(-1),
        controls=[images(*control) for control in control_sizes],
    )


def test_prompt_embeddings_equal_the_pipelines(module, stock):
    for prompt in PROMPTS:
        own = module.encode_prompt(module.base.components, prompt, [])
        embeds, pooled, _ = stock.encode_prompt(prompt, None, max_sequence_length=64)
        torch.testing.assert_close(own["prompt_embeds"], embeds[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(own["pooled_prompt_embeds"], pooled[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        module.encode_prompts(module.base.components, PROMPTS)["pooled_prompt_embeds"],
        stock._get_clip_prompt_embeds(PROMPTS),
    )
    torch.testing.assert_close(
        module.encode_prompts(module.base.components, PROMPTS)["prompt_embeds"],
        stock._get_t5_prompt_embeds(PROMPTS, max_sequence_length=64),
    )


def test_prompt_that_is_cut_is_said(module, caplog, monkeypatch):
    import logging

    monkeypatch.setattr(logging.getLogger("retouch"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("retouch"), "propagate", False)
    for _ in range(2):
        module.encoder._encode_prompt("short", [])
        module.encoder._encode_prompt("x" * 70, [])
    assert [record.getMessage() for record in caplog.records if "cut" in record.getMessage()] == [
        'note: 72 tokens are cut to 64 (model.max_sequence_length): "' + "x" * 60 + '..."'
    ]


@pytest.mark.parametrize("size", [(64, 48), (32, 80)])
def test_image_latents_and_ids_equal_the_pipelines(module, stock, size):
    pixels = to_tensor(photograph("coffee", *size))[None]
    torch.testing.assert_close(pixels, stock.image_processor.preprocess(photograph("coffee", *size)), rtol=0, atol=0)
    mean, _ = module.encode_pixels(module.base.components["vae"], pixels)
    own = module.normalize(mean)
    _, tokens, latent_ids, image_ids = stock.prepare_latents(pixels, 1, 8, size[1], size[0], torch.float32, "cpu")
    torch.testing.assert_close(pack(own), tokens, rtol=0, atol=1e-6)
    torch.testing.assert_close(position_ids(own, 0), latent_ids, rtol=0, atol=0)
    torch.testing.assert_close(position_ids(own, 1), image_ids, rtol=0, atol=0)
    torch.testing.assert_close(unpack(pack(own), *own.shape[-2:]), own, rtol=0, atol=0)


@pytest.mark.parametrize("size", [(64, 48), (48, 80)])
@pytest.mark.parametrize("true_cfg_scale", [1.0, 3.0])
def test_edited_picture_equals_the_pipelines(module, stock, tmp_path, size, true_cfg_scale):
    weights = tmp_path / "pytorch_lora_weights.safetensors"
    save_lora(module.adapter.updates(module.transformer), weights, {})
    image = photograph("astronaut", 64, 64)
    arguments = {
        "image": image,
        "prompt": PROMPTS[0],
        "negative_prompt": "blurry" if true_cfg_scale > 1 else None,
        "true_cfg_scale": true_cfg_scale,
        "num_inference_steps": 5,
        "guidance_scale": 2.5,
        "width": size[0],
        "height": size[1],
        "max_area": size[0] * size[1],
        "max_sequence_length": 64,
        "_auto_resize": False,
        "output_type": "pt",
    }
    unadapted = stock(**arguments, generator=torch.Generator().manual_seed(7)).images
    stock.load_lora_weights(tmp_path)
    expected = stock(**arguments, generator=torch.Generator().manual_seed(7)).images

    raw = RawBatch(["x"], [0], PROMPTS[:1], None, [to_tensor(image)[None]])
    sampling = Sampling(5, 2.5, true_cfg_scale, "blurry")
    own = (
        module.sampler.sample(module.encoder(raw, module.sampling_rules.negative_prompt(sampling)), sampling, size, [7])
        / 2
        + 0.5
    )
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)
    assert (expected - unadapted).abs().max() > 1e-2


def independent_losses(stock, module, batch: RawBatch):
    """Each sample's loss from the stock pipeline's parts and peft, by the definition of rectified flow."""
    transformer, vae = stock.transformer, stock.vae
    adapt_like(transformer, module.transformer)
    losses = []
    for i, prompt in enumerate(batch.prompts):
        latent = vae.encode(batch.target[i : i + 1]).latent_dist
        shape = latent.mean.shape[1:]
        drawn = flow.sample_noise(module.flow.seed, [batch.draws[i]], shape, module.flow.timesteps, 1.0)
        x0 = (latent.mean + latent.std * drawn.latent_eps - vae.config.shift_factor) * vae.config.scaling_factor
        x_t = (1 - drawn.t) * x0 + drawn.t * drawn.eps
        tokens, ids = [stock._pack_latents(x_t, 1, *shape)], []
        ids.append(stock._prepare_latent_image_ids(1, shape[1] // 2, shape[2] // 2, "cpu", torch.float32))
        for k, control in enumerate(batch.controls, 1):
            latents = stock._encode_vae_image(control[i : i + 1], None)
            tokens.append(stock._pack_latents(latents, 1, *latents.shape[1:]))
            height, width = latents.shape[2] // 2, latents.shape[3] // 2
            ids.append(stock._prepare_latent_image_ids(1, height, width, "cpu", torch.float32))
            ids[-1][:, 0] = k
        embeds, pooled, text_ids = stock.encode_prompt(prompt, None, max_sequence_length=64)
        predicted = transformer(
            hidden_states=torch.cat(tokens, 1),
            timestep=drawn.t,
            guidance=torch.ones(1),
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=torch.cat(ids),
        ).sample[:, : tokens[0].shape[1]]
        losses.append((predicted - stock._pack_latents(drawn.eps - x0, 1, *shape)).square().mean())
    return torch.stack(losses)


@pytest.mark.parametrize(
    "control_sizes", [((48, 32),), ((32, 64), (48, 48))], ids=["one control", "two controls of other sizes"]
)
def test_loss_and_gradients_equal_an_independent_computation(module, stock, control_sizes):
    batch = raw_batch(control_sizes=control_sizes)
    own = losses(module, module.encoder(batch))
    expected = independent_losses(stock, module, batch)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    own.mean().backward()
    expected.mean().backward()
    assert_same_gradients(module.transformer, stock.transformer)


def test_batch_of_two_gives_the_mean_of_the_single_losses(module):
    both = raw_batch()
    single = [
        RawBatch(
            [both.keys[i]], [both.draws[i]], [both.prompts[i]], both.target[i : i + 1], [both.controls[0][i : i + 1]]
        )
        for i in range(2)
    ]
    together = losses(module, module.encoder(both))
    alone = torch.cat([losses(module, module.encoder(one)) for one in single])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert (alone[0] - alone[1]).abs() > 1e-3


def test_dropped_caption_is_the_empty_prompt(module):
    batch = raw_batch()
    empty = RawBatch(batch.keys, batch.draws, ["", ""], batch.target, batch.controls)
    captioned = losses(module, module.encoder(batch))
    uncaptioned = losses(module, module.encoder(empty))
    module.flow.caption_dropout_rate = 1.0
    encoded = module.encoder(batch, negative_prompt="")
    torch.testing.assert_close(losses(module, encoded), uncaptioned)
    assert not torch.allclose(captioned, uncaptioned)
    drawn = flow.sample_noise(module.flow.seed, batch.draws, torch.Size([1, 2, 2]), module.flow.timesteps, 1.0).dropout
    module.flow.caption_dropout_rate = float(drawn.min() + drawn.max()) / 2  # one of the two
    expected = torch.where(drawn < module.flow.caption_dropout_rate, uncaptioned, captioned)
    torch.testing.assert_close(losses(module, encoded), expected)


def test_gradient_checkpointing_changes_no_gradient(module):
    latents = module.encoder(raw_batch())
    gradients = []
    for _ in range(2):
        module.zero_grad()
        module.train()
        losses(module, latents).mean().backward()
        gradients.append([p.grad.clone() for p in module.parameters() if p.requires_grad])
        set_checkpointing(module.transformer, "full", module.adapter.bind_rank_mask)
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_two_control_images_condition_the_picture(module):
    raw = raw_batch(names=("astronaut",), control_sizes=((48, 32), (32, 32)))
    raw.target = None
    sampling = Sampling(3, 2.5, 1.0, None)
    both = module.sampler.sample(module.encoder(raw), sampling, (48, 32), [1])
    raw.controls[1] = -raw.controls[1]
    other = module.sampler.sample(module.encoder(raw), sampling, (48, 32), [1])
    raw.controls.pop()
    one = module.sampler.sample(module.encoder(raw), sampling, (48, 32), [1])
    assert (both - other).abs().max() > 1e-3
    assert (both - one).abs().max() > 1e-3


def test_bf16_base_keeps_float32_adapter_and_learns_under_autocast(tiny):
    cfg = compose("train", f"model.pretrained_model_name_or_path={tiny}", "model.dtype=bfloat16")
    module = instantiate(cfg.model)
    module.configure_model()
    trained = {n: p for n, p in module.transformer.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for n, p in module.transformer.named_parameters() if n not in trained} == {torch.bfloat16}
    seen = {}
    module.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = losses(module, module.encoder(raw_batch())).mean()
    loss.backward()
    assert loss.dtype == torch.float32
    assert seen["timestep"].dtype == seen["hidden_states"].dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.values())
