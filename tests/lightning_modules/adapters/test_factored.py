"""LoKr and LoHa: their numbers against peft's, torch.kron and dense matrices, their layers on every base."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoHaConfig, LoKrConfig, inject_adapter_in_model
from peft.tuners.lokr.layer import factorization
from torch import nn

from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.factored import LoHa, LoKr, factor_pair
from lightning_modules.adapters.peft_layers import ADAPTER
from tests.support.combinations import first
from tests.support.other_adapters import KINDS
from tests.support.steps import BASES
from tests.support.tiny_adapters import LAYER, batch, build, gradients, learn, velocity


class Two(nn.Module):
    """Two layers of different sides."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(48, 96), nn.Linear(48, 64)

    def forward(self, x):
        return torch.cat([self.to_q(x), self.to_k(x)], dim=-1)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TARGETS = ["to_q", "to_k"]
GIVEN = {"target_modules": TARGETS, "init_from": None, "lr_pattern": None, "seed": 0}
PAIRS = {
    "LoKr": (LoKr(4, 6, 4, False, **GIVEN), LoKrConfig(r=4, alpha=6, decompose_factor=4)),
    "LoKr even": (LoKr(2, 6, -1, False, **GIVEN), LoKrConfig(r=2, alpha=6, decompose_factor=-1)),
    # peft has no such setting: a rank at which both are whole, and a scale of 1.
    "LoKr whole": (LoKr(4, 6, 4, True, **GIVEN), LoKrConfig(r=24, alpha=24, decompose_factor=4)),
    "LoHa": (LoHa(4, 6, **GIVEN), LoHaConfig(r=4, alpha=6)),
    "LoHa of a high rank": (LoHa(8, 6, **GIVEN), LoHaConfig(r=8, alpha=6)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_outputs_and_gradients_equal_those_of_peft(name):
    """The merged weights are equal as well."""
    adapter, config = PAIRS[name]
    torch.manual_seed(0)
    base = Two()
    own, theirs = copy.deepcopy(base), copy.deepcopy(base)
    adapter.inject(own)
    config.target_modules = TARGETS
    inject_adapter_in_model(config, theirs)
    x = numbers(2, 5, 48)
    assert torch.equal(own(x), base(x))
    learn(type("Module", (), {"transformer": own}))
    pairs = []
    for layer in TARGETS:
        parameters, beside = own.get_submodule(layer).updates[ADAPTER], theirs.get_submodule(layer)
        for part in parameters.names:
            parameter, other = getattr(parameters, part), getattr(beside, part)[ADAPTER]
            other.data = parameter.detach().clone()
            pairs.append((parameter, other))
    results = [one(x) for one in (own, theirs)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for result in results:
        result.square().mean().backward()
    for parameter, other in pairs:
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6)
    for layer, update in adapter.deltas(own).items():
        merging = theirs.get_submodule(layer)
        merging.merge()
        weight = base.get_submodule(layer).weight.detach()
        torch.testing.assert_close(update.updated(weight), merging.get_base_layer().weight.data, rtol=1e-4, atol=1e-5)


def test_sides_are_divided_as_by_peft():
    for factor in (-1, 1, 2, 3, 4, 8, 16, 32):
        assert [factor_pair(n, factor) for n in range(1, 300)] == [factorization(n, factor) for n in range(1, 300)]


# Each base once, each kind several times.
EACH_BASE = [(base, KINDS[number % 2]) for number, base in enumerate(BASES)]


@pytest.mark.parametrize(("base", "adapter"), first(3, EACH_BASE))
def test_on_every_base_it_starts_at_the_base_and_is_the_dequantized_weight_updated(tiny, base, adapter):
    module = build(tiny, adapter, *BASES.get(base, ()), dtype="float32" if base == "float32" else "bfloat16")
    t = torch.tensor([0.2, 0.7])
    x_t, controls, prompt = batch(2)
    for layer in module.adapter.layers(module.transformer).values():
        # Plain layers round once more, before the bias, where rows do not follow each other; those that turned do.
        layer.base_layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    with torch.autocast("cpu", torch.bfloat16, enabled=base != "float32"):
        assert torch.equal(velocity(module, [0.2, 0.7]), module.denoise.base(x_t, t, controls, prompt))
    learn(module, 0.05)
    layer = module.transformer.get_submodule(LAYER)
    linear = layer.get_base_layer()
    weight = linear.dequantize(torch.float32) if hasattr(linear, "dequantize") else linear.weight.float()
    x = numbers(4, linear.in_features)
    wanted = F.linear(x, module.adapter.deltas(module.transformer)[LAYER].updated(weight), linear.bias.float())
    dtype = torch.float32 if base == "float32" else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=base != "float32"):
        got = layer(x if dtype == torch.float32 else x.bfloat16()).float()
    assert (got - wanted).norm() < (1e-5 if base == "float32" else 0.02) * wanted.norm()
    with torch.autocast("cpu", torch.bfloat16, enabled=base != "float32"):
        velocity(module, [0.2, 0.7]).float().square().mean().backward()
    assert all(
        gradient.any() for name, gradient in gradients(module).items() if "single_transformer_blocks.1" not in name
    )


@pytest.mark.parametrize("adapter", ["lora", "dora", "lokr"])
def test_updates_are_copies_that_further_training_does_not_change(tiny, adapter):
    module = build(tiny, adapter)
    learn(module)
    updates = module.adapter.deltas(module.transformer)
    before = {layer: {name: one.clone() for name, one in each.tensors().items()} for layer, each in updates.items()}
    learn(module)
    for layer, each in updates.items():
        assert all(torch.equal(one, before[layer][name]) for name, one in each.tensors().items())


@pytest.mark.parametrize("adapter", KINDS)
def test_inference_weights_are_those_of_the_file(tiny, tmp_path, adapter):
    """Rounded to the base's dtype with their scale in them; afterwards the run goes on with its own."""
    module = build(tiny, adapter, dtype="bfloat16")
    learn(module)
    before = {name: one.clone() for name, one in trainable(module.transformer).items()}
    module.adapter.write(tmp_path, module.adapter.gather(module.trained.parts), module.base, {}, torch.float32)
    from lightning_modules.adapters.applied import AppliedLoRAs

    fresh = module.base.load_transformer()
    loras = AppliedLoRAs([tmp_path / "pytorch_lora_weights.safetensors"])
    loras.load(fresh, module.base)
    module.transformer.eval()
    with torch.no_grad(), module.adapter.in_dtype(module.transformer, torch.bfloat16):
        x_t, controls, prompt = batch(1)
        arguments = [part.bfloat16() for part in (x_t, *controls)]
        prompt = {name: one.bfloat16() for name, one in prompt.items()}
        t = torch.tensor([0.5])
        own = module.velocity(module.transformer, arguments[0], t, arguments[1:], prompt)
        theirs = module.velocity(fresh.eval(), arguments[0], t, arguments[1:], prompt)
    assert torch.equal(own, theirs)
    torch.testing.assert_close(trainable(module.transformer), before, rtol=0, atol=0)
