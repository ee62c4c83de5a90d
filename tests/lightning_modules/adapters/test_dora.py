"""DoRA against its formula on the dequantized weight."""

import pytest
import torch
import torch.nn.functional as F

from lightning_modules.adapters.peft_layers import ADAPTER, without_adapters
from lightning_modules.lora_files.reading import LoRAFile
from tests.support.quantized import NAMES
from tests.support.tiny_adapters import LAYER, build, export, learn, velocity

BASES = {"float32": [], "bfloat16": []} | {
    format: ["model/quantization=fp8", f"model.quantization.format={format}"] for format in NAMES
}


def weight_of(layer):
    base = layer.get_base_layer()
    return base.weight.detach().float() if type(base) is torch.nn.Linear else base.dequantize(torch.float32)


def expected(layer, x, weight):
    """Compute the formula with the norm as a constant; gradients reach m, A and B."""
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    whole = weight + layer.scaling[ADAPTER] * up @ down
    magnitude = layer.lora_magnitude_vector[ADAPTER].weight
    return F.linear(x, (magnitude / whole.detach().norm(dim=1))[:, None] * whole, layer.get_base_layer().bias.float())


@pytest.mark.parametrize("base", BASES)
def test_start_is_bitwise_the_base(tiny, base):
    dtype = "bfloat16" if base == "bfloat16" else "float32"
    module = build(tiny, "dora", *BASES[base], dtype=dtype)
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast or dtype == "bfloat16"):
            dora = velocity(module, [0.3, 0.9])
            with without_adapters(module.transformer):
                assert torch.equal(dora, velocity(module, [0.3, 0.9]))


@pytest.mark.parametrize("base", [name for name in BASES if name != "bfloat16"])
def test_layer_is_the_formula_on_the_dequantized_weight(tiny, base):
    module = build(tiny, "dora", *BASES[base])
    learn(module)
    layer = module.transformer.get_submodule(LAYER)
    weight = weight_of(layer)
    x = torch.randn(2, 5, layer.in_features, requires_grad=True)
    grad = torch.randn(2, 5, layer.out_features)
    trained = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    assert len(trained) == 4
    found, wanted = layer(x), expected(layer, x, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(one, trained, grad) for one in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_under_autocast_small_updates_are_not_lost_in_16_bits(tiny):
    """Magnitudes moved by less than bf16 can resolve."""
    module = build(tiny, "dora")
    learn(module, 1e-3)
    layer = module.transformer.get_submodule(LAYER)
    x = torch.randn(64, layer.in_features)
    base = F.linear(x, weight_of(layer), layer.get_base_layer().bias)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        variant = layer.lora_variant[ADAPTER]
        moved = variant.forward(layer, ADAPTER, x, torch.zeros(64, layer.out_features) + base) - base
    wanted = expected(layer, x, weight_of(layer)) - base
    assert (moved - wanted).norm() < 0.02 * wanted.norm()


def test_a_row_of_zeros_stays_one_and_finite(tiny):
    module = build(tiny, "lora")
    module.transformer.get_submodule(LAYER).get_base_layer().weight.data[3] = 0
    build(tiny, "dora").adapter.initialize(module.transformer)
    layer = module.transformer.get_submodule(LAYER)
    loss = layer(torch.randn(2, layer.in_features)).square().sum()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters() if parameter.requires_grad)


def test_file_starts_another_run_unchanged(tiny, tmp_path):
    """A LoRA also starts a DoRA, with the lengths of its rows."""
    for adapter in ("dora", "lora"):
        trained = build(tiny, adapter)
        learn(trained)
        path = tmp_path / adapter / "pytorch_lora_weights.safetensors"
        path.parent.mkdir()
        export(trained, path)
        again = build(tiny, "dora", f"adapter.init_from={path}", "adapter.alpha=2")
        with torch.no_grad():
            torch.testing.assert_close(velocity(again, [0.5]), velocity(trained, [0.5]), rtol=1e-4, atol=1e-5)
        wanted = LoRAFile(path).read(again.base.layer_names, "x")
        found = again.adapter.deltas(again.transformer)
        assert all((found[name].magnitude == one.magnitude).all() for name, one in wanted.items() if adapter == "dora")
        assert all(isinstance(one.magnitude, torch.Tensor) for one in found.values())


def test_in_16_bits_magnitudes_stay_exact(tiny, tmp_path):
    module = build(tiny, "dora")
    learn(module)
    updates = module.adapter.deltas(module.transformer)
    with module.adapter.in_dtype(module.transformer, torch.bfloat16):
        layer = module.transformer.get_submodule(LAYER)
        assert torch.equal(layer.lora_magnitude_vector[ADAPTER].weight, updates[LAYER].magnitude)
        assert layer.lora_A[ADAPTER].weight.dtype == torch.bfloat16
    assert layer.lora_magnitude_vector[ADAPTER].weight.requires_grad
