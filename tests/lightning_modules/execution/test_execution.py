"""However a step is executed, its loss and gradients are the same: checkpointed, offloaded."""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from hydra.errors import InstantiationException

from foundation.errors import UserError
from lightning_modules.blocks import blocks
from lightning_modules.execution.checkpointing import POLICIES, set_checkpointing
from tests.support.combinations import first
from tests.support.commands import unloaded
from tests.support.steps import BASES, assert_same, family, inputs, made, step
from tests.support.tiny_adapters import build, velocity
from tests.support.tiny_pipelines import every_model


@pytest.mark.parametrize(
    ("model", "settings"),
    first(1, [("flux_kontext", ["model.dtype=bfloat16", *BASES["nf4"]]), ("z_image", ["adapter=tlora"])]),
)
def test_every_position_of_the_dial_gives_the_same_bits(repositories, model, settings):
    module = family(repositories[model], model, "model.gradient_checkpointing=none", *settings)
    plain = step(module)
    for position in (*POLICIES, "every_3"):
        set_checkpointing(module.transformer, position, module.execution.recomputed)
        assert_same(step(module), plain)


@every_model
@pytest.mark.parametrize("adapter", [["adapter.target_modules=all-linear"], ["adapter=full"]])
def test_ddp_waits_exactly_for_parameters_with_a_gradient(repositories, model, adapter):
    module = unloaded(repositories[model], model, "model.dtype=float32", *adapter)
    module.configure_model()
    module.denoise(*inputs(module)).square().mean().backward()
    found = {name for name, one in module.named_parameters() if one.grad is not None}
    assert found == {name for name, _ in module.named_parameters()} - {*module._ddp_params_and_buffers_to_ignore}


@pytest.mark.parametrize(
    ("adapter", "dropout"), [("lora", 0.0), ("lora", 0.5), ("tlora", 0.5), ("dora", 0.0), ("loha", 0.0)]
)
@pytest.mark.parametrize("policy", ["full", "attention"])
def test_generators_are_restored_only_for_dropout(tiny, monkeypatch, adapter, dropout, policy):
    module = made(tiny, adapter, "float32", *[f"adapter.dropout={dropout}"] * (dropout > 0))
    found, read, get_rng_state = [], [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: read.append(1) or get_rng_state())
    for one in ("none", policy):
        module.execution.set_checkpointing(module.transformer, one)
        torch.manual_seed(0)
        found.append(step(module))
    assert_same(*found)
    assert bool(read) == bool(dropout)


def test_casting_inputs_once_changes_no_bit(tiny):
    module = made(tiny, "lora", "bf16")
    once = step(module)
    for block in list(blocks(module.transformer).values())[:-1]:
        assert len(block.attn._forward_pre_hooks) == 1
        block.attn._forward_pre_hooks.clear()
    assert_same(once, step(module))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.attention_backend=fast"], "model.attention_backend=fast: choose one of FA3, FA4, .*native"),
        (["model.attention_backend=sage"], "sage has no backward pass: use it in prediction only"),
        (["model.attention_backend=flash"], "cannot be used here"),
        (["model.attention_backend=FA3"], "No module named 'flash_attn_interface'. To install it: build"),
        (["model.gradient_checkpointing=some"], "choose none, every_2 .* attention"),
        (["model.offload.blocks=5"], "model.offload.blocks=5: FluxTransformer2DModel has 0 to 4"),
        (["model.offload.blocks=2", "model.gradient_checkpointing=false"], "needs model.gradient_checkpointing=full"),
    ],
)
def test_impossible_execution_is_named(tiny, settings, message):
    def configure():
        module = unloaded(tiny, "flux_kontext", *settings)
        module.check()
        module.configure_model()

    with pytest.raises((UserError, InstantiationException), match=message):
        configure()


def test_attention_backend_is_the_dispatcher_s(tiny):
    torch.backends.cuda.enable_cudnn_sdp(True)
    plain, chosen = (build(tiny, "lora", *more) for more in ([], ["model.attention_backend=_native_math"]))
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "with masks it can be NaN"
    torch.testing.assert_close(velocity(plain, [0.5]), velocity(chosen, [0.5]))
    found = {block.attn.processor._attention_backend.value for block in blocks(chosen.transformer).values()}
    assert [*map(str, found)] == ["_native_math"]
    assert _AttentionBackendRegistry._active_backend == AttentionBackendName.NATIVE, "others are as before"
