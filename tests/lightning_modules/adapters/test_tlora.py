"""T-LoRA's layers against closed forms, its files against stock diffusers, its steps against plain ones."""

import pytest
import torch

from datamodules.batch import LatentBatch
from foundation.errors import UserError
from lightning_modules.adapters.peft_layers import ADAPTER
from lightning_modules.adapters.rank_schedule import RankSchedule
from tests.support.tiny_adapters import ADAPTERS, LAYER, RANK, batch, build, export, gradients, learn, velocity


@pytest.mark.parametrize("shape", [(3, 64), (3, 5, 64), (3, 2, 5, 64)])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_layer_equals_the_dense_closed_form_forward_and_backward(tiny, adapter, shape):
    module = build(tiny, adapter, "adapter.alpha_rank_scale=1.5")
    learn(module)
    layer = module.transformer.double().get_submodule(LAYER)
    timesteps = torch.tensor([900.0, 500.0, 0.0])
    mask = RankSchedule("timestep", RANK, 1, 1.5).mask(timesteps).double()
    assert mask.sum(dim=1).tolist() == [1, 2, 4]
    mask = mask.view(3, *[1] * (len(shape) - 2), RANK)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    base, scale = layer.get_base_layer(), 6 / RANK
    own = [x, *(parameter for half in (down, up) for parameter in half.parameters() if parameter.requires_grad)]
    if adapter == "tlora":
        dense = ((x @ down.weight.T) * mask) @ up.weight.T
    else:
        frozen = ((x @ down.initial.T) * mask) @ up.initial.T
        dense = ((x @ down.weight.T) * mask * down.singular_values) @ up.weight.T - frozen
    expected = base(x) + scale * dense
    weights = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), own)
    [gate] = module.rank_gates
    gate.open(timesteps, None, torch.float64)
    got = layer(x)
    got_gradients = torch.autograd.grad((got * weights).sum(), own)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_gradients, expected_gradients, rtol=1e-11, atol=1e-11)


def test_full_mask_is_plain_lora_bitwise(tiny):
    plain = build(tiny, "lora")
    masked = build(tiny, "tlora", "adapter.init_lora_weights=true", "adapter.rank_schedule=constant")
    for module in (plain, masked):
        learn(module)
    outputs = [velocity(module, [0.3, 0.9]) for module in (plain, masked)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    torch.testing.assert_close(gradients(plain), gradients(masked), rtol=0, atol=0)


@pytest.mark.parametrize(("adapter", "other"), [("tlora", "ortho_tlora"), ("ortho_tlora", "lora")])
def test_init_from_refuses_components_of_another_width(tiny, tmp_path, adapter, other):
    export(build(tiny, adapter), tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="was made by adapter="):
        build(tiny, other, f"adapter.init_from={tmp_path / 'x.safetensors'}")


def test_dropout_is_a_function_of_the_batch_s_draws_and_leaves_the_global_generator(tiny):
    """Equal draws drop the same inputs, whatever was drawn before; other draws and samples drop different ones."""
    module = build(tiny, "tlora", "adapter.dropout=0.5", "model.timesteps.logit_std=0", "model.vae_encode_mode=mode")
    learn(module, spread=1.0)
    x_t, controls, prompt = batch(1)
    x_t, controls, prompt = (
        x_t.expand(2, -1, -1, -1),
        [one.expand(2, -1, -1, -1) for one in controls],
        {name: tensor.expand(2, *tensor.shape[1:]) for name, tensor in prompt.items()},
    )
    dropped = []
    layer = module.transformer.get_submodule(LAYER)
    layer.lora_dropout[ADAPTER].register_forward_hook(lambda _, inputs, output: dropped.append((output == 0).clone()))
    losses = []
    for draws in ([3, 4], [3, 5], [3, 4]):
        torch.manual_seed(draws[1])
        state = torch.get_rng_state()
        latents = LatentBatch(["x", "y"], draws, x_t, x_t, controls, prompt, prompt, None)
        losses.append(module.training_step(latents, 0)["losses"])
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(dropped[0], dropped[2])
    assert not torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[0][0], dropped[0][1])
    assert 0.3 < dropped[0].float().mean() < 0.7
