"""Parity with diffusers' ZImagePipeline, tiny and in float32."""

import math
from copy import deepcopy
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial

import pytest
import torch
from diffusers import ZImagePipeline
from hydra.utils import instantiate

from datamodules.batch import RawBatch
from datamodules.images.decoding import to_tensor
from datamodules.pairs import collate_pixels
from lightning_modules import flow
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.adapters.rank_mask import attach_rank_schedule, mask_forwards, sampling_step
from lightning_modules.execution import kernels
from lightning_modules.execution.block_offload import BlockStream
from lightning_modules.execution.blocks import blocks
from lightning_modules.execution.checkpointing import POLICIES, set_checkpointing
from lightning_modules.family import Sampling
from tests.support.commands import compose
from tests.support.losses import losses
from tests.support.pictures import photograph
from tests.support.same_adapters import adapt_like, assert_same_gradients, randomize

# Of 32 tokens with the chat around them and of 70: the transformer pads each sample to a multiple of 32.
PROMPTS = ["make it rainy", "Turn the cat into a dog, please, and the dog into a cat"]
LENGTH = 96


@pytest.fixture
def repository(repositories):
    return repositories["z_image"]


def build(repository, *more):
    """The family's module, with an adapter whose both halves are random, alpha different from rank."""
    settings = [f"model.pretrained_model_name_or_path={repository}", f"model.max_sequence_length={LENGTH}"]
    settings += ["model.dtype=float32", "adapter.rank=4", "adapter.alpha=6"]
    module = instantiate(compose("train", "model=z_image", *settings, *more).model, _convert_="all")
    module.configure_model()
    randomize(module.transformer)
    return module


@pytest.fixture
def module(repository):
    return build(repository)


@pytest.fixture
def stock(repository):
    pipeline = ZImagePipeline.from_pretrained(repository)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def raw_sample(number, size=(48, 32)):
    """A batch of one."""
    pixels = to_tensor(photograph(("astronaut", "chelsea")[number], *size))[None]
    return RawBatch([f"sample {number}"], [5 + number], [PROMPTS[number]], pixels, [])


def test_prompt_embeddings_equal_the_pipelines(module, stock, caplog):
    together = module.encode_prompts(module.base.components, [*PROMPTS, "", "too long " * 20])
    for number, prompt in enumerate((*PROMPTS, "", "too long " * 20)):
        own = module.encode_prompt(module.base.components, prompt, [])
        (expected,), _ = stock.encode_prompt(prompt, None, False, max_sequence_length=LENGTH)
        torch.testing.assert_close(own["prompt_embeds"], expected, rtol=0, atol=1e-5)
        assert own["prompt_embeds_mask"].tolist() == [1] * len(expected)
        assert together["prompt_embeds_mask"][number].tolist() == [1] * len(expected) + [0] * (LENGTH - len(expected))
        torch.testing.assert_close(together["prompt_embeds"][number, : len(expected)], expected, rtol=0, atol=1e-5)
    assert len(expected) == LENGTH
    module.encoder._encode_prompt("too long " * 20, [])
    assert caplog.text.count("tokens are cut to 96") == 1
    counts = [19 + len(prompt) for prompt in PROMPTS]  # a token for each letter
    assert module.prompt_tokens(module.base.components, PROMPTS) == (counts, LENGTH)


def test_a_language_model_with_its_head_gives_the_same(module, monkeypatch):
    from transformers import Qwen3ForCausalLM

    parts = module.base.components
    before = module.encode_prompt(parts, PROMPTS[0], [])
    whole = Qwen3ForCausalLM(parts["text_encoder"].config)
    whole.model = parts["text_encoder"]
    monkeypatch.setattr(whole.lm_head, "forward", None)
    monkeypatch.setitem(parts._loaded, "text_encoder", whole)
    after = module.encode_prompt(parts, PROMPTS[0], [])
    assert torch.equal(before["prompt_embeds"], after["prompt_embeds"])


def test_target_latents_are_what_the_pipeline_decodes(module, stock):
    raw = raw_sample(0, (64, 48))
    mean, _ = module.encode_pixels(module.base.components["vae"], raw.target)
    own = module.normalize(mean)
    config = stock.vae.config
    expected = (stock.vae.encode(raw.target).latent_dist.mode() - config.shift_factor) * config.scaling_factor
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5)
    again = stock.vae.decode(own / config.scaling_factor + config.shift_factor).sample
    torch.testing.assert_close(module.decode(module.base.components["vae"], own), again, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 48), (48, 80), (64, 64)])
@pytest.mark.parametrize("guidance_scale", [0.0, 3.0])
def test_pictures_equal_the_pipelines(module, stock, tmp_path, size, guidance_scale):
    """Two prompts of different lengths, of sizes of 12, 15 and 16 tokens, which the transformer pads."""
    save_lora(module.adapter.updates(module.transformer), tmp_path / "pytorch_lora_weights.safetensors", {})

    def pictures():
        return stock(
            prompt=list(PROMPTS),  # the pipeline writes into these lists
            negative_prompt=["blurry"] * 2 if guidance_scale > 0 else None,
            num_inference_steps=5,
            guidance_scale=guidance_scale,
            width=size[0],
            height=size[1],
            max_sequence_length=LENGTH,
            output_type="pt",
            generator=[torch.Generator().manual_seed(seed) for seed in (7, 8)],
        ).images

    unadapted = pictures()
    stock.load_lora_weights(tmp_path)
    expected = pictures()
    sampling = Sampling(5, guidance_scale, None, "blurry")
    raw = RawBatch(["x", "y"], [0, 1], PROMPTS, None, [])
    encoded = module.encoder(raw, module.sampling_rules.negative_prompt(sampling))
    own = module.sampler.sample(encoded, sampling, size, [7, 8]) / 2 + 0.5
    torch.testing.assert_close(own.clamp(0, 1), expected, rtol=0, atol=1e-5)
    assert (expected - unadapted).abs().max() > 1e-2


def test_guidance_is_off_at_0_alone(module):
    prompts = [module.sampling_rules.negative_prompt(Sampling(5, scale, None, "blurry")) for scale in (0.0, 0.5, 1.0)]
    assert prompts == [None, "blurry", "blurry"]


def independent_losses(stock, module, samples):
    """Each sample's loss from the stock pipeline's parts and peft, by the definition of rectified flow."""
    adapt_like(stock.transformer, module.transformer)
    config, losses = stock.vae.config, []
    for raw in samples:
        latent = stock.vae.encode(raw.target).latent_dist
        drawn = flow.sample_noise(module.flow.seed, raw.draws, latent.mean.shape[1:], module.flow.timesteps, 1.0)
        x0 = (latent.mean + latent.std * drawn.latent_eps - config.shift_factor) * config.scaling_factor
        x_t = (1 - drawn.t) * x0 + drawn.t * drawn.eps
        embeds, _ = stock.encode_prompt(raw.prompts[0], None, False, max_sequence_length=LENGTH)
        (predicted,) = stock.transformer([x_t[0].unsqueeze(1)], (1000 - 1000 * drawn.t) / 1000, embeds).sample
        losses.append((-predicted.squeeze(1) - (drawn.eps - x0)[0]).square().mean())
    return torch.stack(losses)


def test_loss_and_gradients_equal_an_independent_computation(module, stock):
    """In a batch of two whose prompt lengths differ: neither meets the other's, nor padding."""
    raws = [raw_sample(number) for number in range(2)]
    own = losses(module, module.encoder(collate_pixels(raws)))
    expected = independent_losses(stock, module, raws)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    assert (own[0] - own[1]).abs() > 1e-3
    own.mean().backward()
    expected.mean().backward()
    assert_same_gradients(module.transformer, stock.transformer)


def test_padding_has_no_influence(module):
    """What stands in the padding; if it were taken for text it would have one."""
    latents = module.encoder(collate_pixels([raw_sample(number) for number in range(2)]))
    length = int(latents.prompt["prompt_embeds_mask"][0].sum())
    assert length < latents.prompt["prompt_embeds"].shape[1]
    before = losses(module, latents)
    latents.prompt["prompt_embeds"][0, length:] = 100.0
    assert torch.equal(losses(module, latents), before)
    latents.prompt["prompt_embeds_mask"][0, length:] = 1
    assert (losses(module, latents) - before)[0].abs() > 1e-4


def test_dropped_captions_have_the_length_of_the_empty_prompt(module):
    batch = collate_pixels([raw_sample(number) for number in range(2)])
    captioned, encoded = losses(module, module.encoder(batch)), module.encoder(batch, "")
    batch.prompts = ["", ""]
    uncaptioned = losses(module, module.encoder(batch))
    assert (captioned - uncaptioned).abs().min() > 1e-6
    shape = torch.Size([1, 2, 2])
    drawn = flow.sample_noise(module.flow.seed, batch.draws, shape, module.flow.timesteps, 1.0).dropout
    for rate in (1.0, float(drawn.min() + drawn.max()) / 2):  # both, and one of the two
        module.flow.caption_dropout_rate = rate
        expected = torch.where(drawn < rate, uncaptioned, captioned)
        torch.testing.assert_close(losses(module, encoded), expected, rtol=1e-5, atol=1e-6)


def test_what_sees_a_batch_as_one_row_is_found(module):
    """T-LoRA must not adapt these: each layer whose input has no samples, and no other."""
    rows = {}
    for name, layer in module.transformer.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in name:
            layer.register_forward_pre_hook(lambda _, args, name=name: rows.update({name: len(args[0])}))
    losses(module, module.encoder(collate_pixels([raw_sample(number) for number in range(2)])))
    flattened = {name for name, count in rows.items() if count != 2}
    assert flattened == {name for name in rows if any(fnmatchcase(name, one) for one in module.layers.flattened)}
    assert flattened == {"all_x_embedder.2-1", "cap_embedder.1"}


@pytest.mark.parametrize("kind", ["timestep", "normalised", "step_index", "constant"])
def test_each_forward_of_the_stock_pipeline_has_the_rank_of_its_step(repository, stock, tmp_path, kind):
    """Against the formulas, of the scheduler's timesteps; in bf16, whose own rounds them; and none is left behind."""
    ranks_of = ["adapter.rank=16", "adapter.min_rank=3", f"adapter.rank_schedule={kind}"]
    module = build(repository, "adapter=tlora", *ranks_of)
    header = {"adapter": module.adapter.metadata()}
    save_lora(module.adapter.updates(module.transformer), tmp_path / "pytorch_lora_weights.safetensors", header)
    stock.load_lora_weights(tmp_path, adapter_name="a")
    stock.to(torch.bfloat16)
    attach_rank_schedule(stock, tmp_path)
    ranks, layer = [], stock.transformer.layers[0].attention.to_q
    layer.lora_B["a"].register_forward_pre_hook(lambda _, args: ranks.append(int((args[0] != 0).any(1).any(0).sum())))
    for steps in (7, 4):
        ranks.clear()
        assert sampling_step(stock) is None
        stock(PROMPTS[0], width=32, height=32, num_inference_steps=steps, guidance_scale=2.0, output_type="latent")
        t = [Fraction(float(timestep)) for timestep in stock.scheduler.timesteps]
        progress = {
            "timestep": [(1000 - now) / 1000 for now in t],
            "normalised": [(1000 - now) / (1000 - t[-1]) for now in t],
            "step_index": [Fraction(i, steps - 1) for i in range(steps)],
            "constant": [Fraction(1)] * steps,
        }[kind]
        assert ranks == [math.floor(p * 13) + 3 for p in progress]
        assert (len(set(ranks)) > 2) == (kind != "constant")


def test_after_pictures_samples_have_their_own_timesteps(repository):
    """Without gradients, too, as when the validation loss is measured."""
    module = build(repository, "adapter=tlora", "adapter.rank=16", "model.timesteps.law=uniform")
    mask_forwards(module.transformer, module.rank_gates, lambda *_: module.sampler.current_step())
    latents = module.encoder(collate_pixels([raw_sample(number) for number in range(2)]))
    with torch.no_grad():
        before = losses(module, latents)
        ranks = module.rank_gates[0].active_ranks
        module.sampler.sample(latents, Sampling(3, 0.0, None, None), (48, 32), [7, 8])
        assert torch.equal(losses(module, latents), before)
    assert torch.equal(module.rank_gates[0].active_ranks, ranks)
    drawn = flow.sample_noise(module.flow.seed, latents.draws, torch.Size([1, 2, 2]), module.flow.timesteps, 1.0)
    assert ranks.tolist() == module.adapter.schedule.active_ranks(1000 * drawn.t.flatten()).tolist()
    assert len(set(ranks.tolist())) == 2


def loss_and_gradients(repository, change):
    """Of a T-LoRA on every layer, with prompts of two lengths at two timesteps: masks of ranks and of attention.

    Args:
        change: what is done to the module before.
    """
    module = build(repository, "adapter=tlora", "adapter.target_modules=all-linear")
    set_checkpointing(module.transformer, "none", module.adapter.bind_rank_mask)
    change(module)
    loss = losses(module, module.encoder(collate_pixels([raw_sample(number) for number in range(2)])))
    loss.mean().backward()
    gradients = {name: one.grad for name, one in trainable(module.transformer).items()}
    assert len(gradients) > 50
    return {"loss": loss.detach(), **gradients}


def checkpointed(policy, module):
    set_checkpointing(module.transformer, policy, module.adapter.bind_rank_mask)


def offloaded(module):
    BlockStream(list(blocks(module.transformer).values())[::2], torch.device("cpu"))
    checkpointed("full", module)


WAYS = {policy: partial(checkpointed, policy) for policy in POLICIES} | {"offloaded": offloaded}


@pytest.mark.parametrize("way", WAYS)
def test_however_blocks_are_computed_loss_and_gradients_are_the_same_bits(repository, way):
    expected = loss_and_gradients(repository, lambda module: None)
    for name, own in loss_and_gradients(repository, WAYS[way]).items():
        assert torch.equal(own, expected[name]), name


@pytest.mark.slow
def test_compiled_blocks_differ_by_the_order_of_sums(repository, monkeypatch):
    """In what all blocks have of the timestep; the rest are the same bits."""
    expected = loss_and_gradients(repository, lambda module: None)
    monkeypatch.setattr(kernels.torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    compiled = loss_and_gradients(repository, lambda module: kernels.compile_blocks(module.transformer, None))
    for name, own in compiled.items():
        if name.startswith("t_embedder"):
            torch.testing.assert_close(own, expected[name], rtol=0, atol=1e-6 * float(expected[name].abs().max()))
        else:
            assert torch.equal(own, expected[name]), name


@pytest.mark.slow
def test_compiled_blocks_take_every_batch(module, monkeypatch):
    """Of one sample and of two, padded and not: refiners and layers are one class, whose graphs have a limit."""
    monkeypatch.setattr(kernels.torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    for refiners in (module.transformer.noise_refiner, module.transformer.context_refiner):
        refiners.append(deepcopy(refiners[0]))  # two, as the real model has
    kernels.compile_blocks(module.transformer, dynamic=True)
    set_checkpointing(module.transformer, "none", module.adapter.bind_rank_mask)
    raws = [raw_sample(number) for number in range(2)]
    for batch in (raws, [raws[1], raws[1]], raws[:1]):
        losses(module, module.encoder(collate_pixels(batch))).mean().backward()
