"""Preservation: the base's output next to an adapter, under every kind of execution."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.combinations import first
from tests.support.objectives import gradients, latent_batch
from tests.support.steps import assert_same, made, with_a_block_of_each_kind
from tests.support.tiny_adapters import batch, build, export, learn


def autocast(module):
    return torch.autocast("cpu", torch.bfloat16, enabled=module.base.dtype != torch.float32, cache_enabled=False)


def asked():
    """Return the predictions of a denoiser."""
    x_t, controls, prompt = batch()
    return x_t, torch.tensor([0.2, 0.7]), controls, prompt


@pytest.mark.parametrize(
    ("base", "adapter"),
    first(
        3,
        [
            *[("rotated", "tlora"), ("fp8", "lora"), ("float32", "ortho_tlora")],
            *((base, "tlora") for base in ("float32", "bf16", "fp8", "int8_w8a8", "nf4")),
        ],
    ),
)
def test_base_is_bitwise_the_transformer_without_its_adapter(tiny, base, adapter):
    module = made(tiny, adapter, base)
    with autocast(module):
        before = module.denoise(*asked()).detach()
        found = module.denoise.base(*asked())
        with torch.no_grad():
            expected = module.velocity(module.base.load_transformer(), *asked())
        assert torch.equal(found, expected)
        assert not found.requires_grad
        assert not torch.equal(found, before)
        assert torch.equal(module.denoise(*asked()).detach(), before)


def test_after_an_error_in_the_base_the_adapter_is_there_again(tiny):
    module = made(tiny, "tlora", "float32")
    before = module.denoise(*asked()).detach()
    x_t, t, controls, _ = asked()
    with pytest.raises(KeyError):
        module.denoise.base(x_t, t, controls, {})
    hook = module.transformer.transformer_blocks[0].attn.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.denoise.base(*asked())
    hook.remove()
    assert torch.equal(module.denoise(*asked()).detach(), before)


def test_after_failed_sampling_forward_passes_have_their_own_timesteps(tiny):
    """The ranks are not those of the interrupted sampling step; contrastive guidance needs this."""
    module, calls = made(tiny, "tlora", "float32"), []
    with torch.no_grad():
        before = module.denoise(*asked())
    latents = latent_batch([3, 4])
    hook = module.transformer.proj_out.register_forward_hook(
        lambda *_: calls.append(1) or (None if len(calls) < 3 else 1 / 0)
    )
    with pytest.raises(ZeroDivisionError):
        module.sampler.sample(latents, module.sampler.sampling, (48, 32), [0, 1])
    hook.remove()
    with torch.no_grad():
        assert torch.equal(module.denoise(*asked()), before)


@pytest.mark.parametrize("more", [[], ["model.offload.blocks=2", "model.gradient_checkpointing=full"]])
def test_training_adapter_stays_in_the_base(tiny, tmp_path, more):
    assistant = build(tiny, "lora", "adapter.rank=2")
    learn(assistant)
    export(assistant, tmp_path / "pytorch_lora_weights.safetensors")
    settings = [*more, f"model.training_adapter={tmp_path}"]
    module, fresh = (build(tiny, "lora", *settings) for _ in range(2))
    learn(module)
    found, expected = module.denoise.base(*asked()), fresh.denoise(*asked())
    assert torch.equal(found, expected)
    assert not torch.equal(found, build(tiny, "lora").denoise(*asked()))


EXECUTIONS = {
    "full": ["model.gradient_checkpointing=full"],
    "attention": ["model.gradient_checkpointing=attention"],
    "every_2": ["model.gradient_checkpointing=every_2"],
    "blocks": ["model.gradient_checkpointing=full", "model.offload.blocks=3"],
    "activations": ["model.offload.activations=true"],
    "both": ["model.gradient_checkpointing=full", "model.offload.blocks=2", "model.offload.activations=true"],
}


OBJECTIVES = {
    "preserve": [
        "objective.preserve.outside=0.5",
        "objective.preserve.prompts=[sharper]",
        "objective.preserve.weight=3",
        "objective.contrastive_guidance=3",
    ],
    "dpo": ["objective=dpo", "objective.beta=20"],
    "slider": ["objective=slider", "objective.preserve.outside=0.5"],
}


@pytest.mark.parametrize(
    ("objective", "adapter", "base", "execution"),
    first(
        3,
        [
            ("preserve", "tlora", "float32", "full"),
            ("preserve", "lora", "int8_w8a8", "attention"),
            ("dpo", "tlora", "float32", "attention"),
            ("slider", "tlora", "float32", "every_2"),
            ("preserve", "tlora", "nf4", "blocks"),
            ("preserve", "lora", "bf16", "activations"),
            ("preserve", "tlora", "fp8", "both"),
            ("preserve", "lora", "nf4", "every_2"),
            ("dpo", "lora", "float32", "full"),
            ("slider", "ortho_tlora", "float32", "full"),
        ],
    ),
)
def test_however_it_is_executed_a_step_is_bitwise_the_same(tiny, objective, adapter, base, execution):
    """The base's forward pass runs between a forward pass and its backward pass, which recomputes blocks."""
    plain = made(tiny, adapter, base, *OBJECTIVES[objective])
    other = made(tiny, adapter, base, *OBJECTIVES[objective], *EXECUTIONS[execution])
    for masked in (False, True):
        latents = latent_batch(range(4), rejected=True, masked=masked)
        with autocast(plain):
            assert_same(gradients(other, latents), gradients(plain, latents))


@pytest.mark.slow
def test_compiled_blocks_have_their_graphs_after_one_step(tiny, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    plain, module = (
        with_a_block_of_each_kind(made(tiny, "tlora", "float32", *OBJECTIVES["preserve"], *more))
        for more in ([], ["model.compile=true"])
    )
    graphs = []
    for number in range(4):
        latents = latent_batch([2 * number, 2 * number + 1], masked=number % 2 == 0)
        assert_same(gradients(module, latents), gradients(plain, latents))
        graphs.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    # Of each kind of block one with gradients, and one without for the model and for its base.
    assert graphs == [6] * 4
