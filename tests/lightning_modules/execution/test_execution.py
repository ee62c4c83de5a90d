"""However a step is executed, its loss and gradients are the same: checkpointed, offloaded, cut."""

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from hydra.errors import InstantiationException

from foundation.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.blocks import LastBlock, blocks
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
        set_checkpointing(module.transformer, position, module.adapter.bind_rank_mask)
        assert_same(step(module), plain)


@every_model
def test_last_block_for_only_the_target_gives_the_same_loss_and_gradients(repositories, model):
    """They agree up to rounding, since matrix products of other shapes add in another order."""
    module = family(repositories[model], model, "adapter.target_modules=all-linear")
    last = list(blocks(module.transformer).values())[-1]
    if module.last_block is None:
        pytest.skip("this family's computes all tokens")
    assert isinstance(last.forward, LastBlock)
    results = []
    for cut in (True, False):
        module.transformer.zero_grad()
        if not cut:
            last.forward = last.forward.full
        loss = module.denoise(*inputs(module)).square().mean()
        loss.backward()
        of_layers = {name: p.grad for name, p in trainable(module.transformer).items() if p.grad is not None}
        results.append({"loss": loss.detach(), **of_layers})
    for name, own in results[0].items():
        torch.testing.assert_close(own, results[1][name], rtol=1e-4, atol=1e-6)
    ignored = module._ddp_params_and_buffers_to_ignore
    # DDP waits for these.
    waited_for = {name: p for name, p in module.transformer.named_parameters() if f"transformer.{name}" not in ignored}
    assert waited_for.keys() <= results[0].keys()
    # What reaches only the text that is cut away has no gradient, or one of zeros.
    assert all(not gradient.any() for name, gradient in results[1].items() if name not in results[0])


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
