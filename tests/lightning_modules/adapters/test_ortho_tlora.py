"""Orthogonal components: where they start, what they compute, their files."""

import pytest
import torch

from datamodules.errors import UserError
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.written import save_lora
from lightning_modules.adapters.peft_layers import ADAPTER, adapter_state, adapter_tensors, lora_layers
from lightning_modules.layers import NO_NATIVE_NAMES
from tests.support.tiny_adapters import LAYER, RANK, build, export, learn, quantize, velocity


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("more", ["adapter.svd_of=weight", "adapter.svd_of=random"])
def test_orthogonal_adapter_starts_at_exactly_zero(tiny, more, autocast):
    module = build(tiny, "ortho_tlora", more, "adapter.target_modules=all-linear")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fresh = velocity(module, [0.1, 0.7])
        module.transformer.disable_adapters()
        assert torch.equal(fresh, velocity(module, [0.1, 0.7]))


@pytest.mark.parametrize("sig_type", ["principal", "last", "middle"])
@pytest.mark.parametrize("svd_of", ["weight", "random"])
def test_orthogonal_adapter_starts_from_singular_triples(tiny, svd_of, sig_type):
    module = build(tiny, "ortho_tlora", f"adapter.sig_type={sig_type}", f"adapter.svd_of={svd_of}",
                   "adapter.target_modules=all-linear")  # fmt: skip
    rectangular = 0
    for layer in lora_layers(module.transformer, ADAPTER).values():
        q, p = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        values = layer.lora_A[ADAPTER].singular_values
        torch.testing.assert_close(q @ q.T, torch.eye(RANK), rtol=0, atol=1e-5)
        torch.testing.assert_close(p.T @ p, torch.eye(RANK), rtol=0, atol=1e-5)
        assert (values.diff() <= 0).all()
        if svd_of == "weight":
            weight = layer.get_base_layer().weight
            torch.testing.assert_close(weight @ q.T, p * values, rtol=1e-3, atol=1e-4)
            every = torch.linalg.svdvals(weight)
            start = {"principal": 0, "last": len(every) - RANK, "middle": -((RANK - len(every)) // 2)}[sig_type]
            torch.testing.assert_close(values, every[start : start + RANK], rtol=1e-4, atol=1e-5)
        rectangular += layer.in_features != layer.out_features
    assert rectangular > 3


def test_random_singular_values_are_those_of_a_matrix_with_standard_deviation_1_over_rank(tiny):
    """Marchenko and Pastur: between |sqrt(rows) - sqrt(columns)| and sqrt(rows) + sqrt(columns) times the deviation."""
    largest = []
    for seed in range(3):
        module = build(tiny, "ortho_tlora", "adapter.sig_type=principal", f"adapter.seed={seed}")
        layer = module.transformer.get_submodule(LAYER)
        largest.append(float(layer.lora_A[ADAPTER].singular_values[0].detach()))
        assert not torch.equal(
            layer.lora_A[ADAPTER].weight,
            module.transformer.get_submodule("transformer_blocks.1.attn.to_q").lora_A[ADAPTER].weight,
        )
    assert torch.tensor(largest).mean() == pytest.approx((64**0.5 + 64**0.5) / RANK, rel=0.1)


def test_rank_above_the_singular_values_is_refused(tiny):
    with pytest.raises(UserError, match=r"adapter.rank=65: transformer_blocks.0.attn.to_\w+ has 64 singular values"):
        build(tiny, "ortho_tlora", "adapter.rank=65")


def test_small_change_of_an_orthogonal_adapter_survives_bf16(tiny):
    """The difference of two bf16 products would have an error of 2**-9 of what cancels, here 50 times the change."""
    module = build(tiny, "ortho_tlora", "adapter.sig_type=principal", "adapter.rank_schedule=constant")
    learn(module, spread=1e-4)
    layer = module.transformer.get_submodule(LAYER)
    [gate] = module.rank_gates
    gate.open(torch.zeros(1), None, torch.float32)
    x = torch.randn(1, 50, 64)
    exact = layer(x) - layer.get_base_layer()(x)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    gate.open(torch.zeros(1), None, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = up(down(x)) * (6 / RANK)
        naive = (x @ (down.singular_values[:, None] * down.weight).T) @ up.weight.T - (
            x @ down.initial.T
        ) @ up.initial.T
    assert (ours - exact).norm() < 0.02 * exact.norm()
    assert (naive * (6 / RANK) - exact).norm() > exact.norm()


def test_singular_vectors_of_a_quantized_layer_are_of_what_it_computes_with(tiny):
    from bitsandbytes.functional import dequantize_4bit

    module = build(tiny, "ortho_tlora", "adapter.svd_of=weight", "adapter.sig_type=principal")
    module.transformer = module.base.load_transformer()
    quantize(module.transformer)
    module.adapter.inject(module.transformer)
    layer = module.transformer.get_submodule(LAYER)
    base = layer.get_base_layer().weight
    weight = dequantize_4bit(base.data, base.quant_state).float()
    q, p = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    torch.testing.assert_close(weight @ q.T, p * layer.lora_A[ADAPTER].singular_values, rtol=1e-3, atol=1e-4)


def test_orthogonal_file_is_the_exact_lora_of_twice_the_rank_its_components_in_pairs(tiny, tmp_path):
    module = build(tiny, "ortho_tlora")
    learn(module)
    export(module, tmp_path / "x.safetensors")
    update = LoRAFile(tmp_path / "x.safetensors").read(LayerNames(module.transformer, NO_NATIVE_NAMES), "tiny")[LAYER]
    layer = module.transformer.get_submodule(LAYER)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    a, b = update.down, update.up / (6 / RANK)
    assert (a.shape, b.shape) == ((2 * RANK, 64), (64, 2 * RANK))
    for r in range(RANK + 1):
        dense = (up.weight[:, :r] * down.singular_values[:r]) @ down.weight[:r] - up.initial[:, :r] @ down.initial[:r]
        torch.testing.assert_close(b[:, : 2 * r] @ a[: 2 * r], dense.detach(), rtol=1e-5, atol=1e-5)


def test_init_from_a_file_in_bf16_keeps_a_small_change(tiny, tmp_path):
    module = build(tiny, "ortho_tlora", "adapter.sig_type=principal")
    learn(module, spread=1e-4)
    updates = module.adapter.updates(module.transformer)
    save_lora(updates, tmp_path / "x.safetensors", {"adapter": module.adapter.metadata()}, torch.bfloat16)
    again = build(tiny, "ortho_tlora", f"adapter.init_from={tmp_path / 'x.safetensors'}")
    for name, exact in adapter_state(module.transformer).items():
        got = adapter_state(again.transformer)[name]
        assert (got - exact).norm() < 0.004 * exact.norm(), name


def test_checkpoint_of_an_orthogonal_adapter_holds_what_is_frozen_too(tiny):
    """Another machine's decomposition may differ in its last bits, or in its signs."""
    module = build(tiny, "ortho_tlora")
    names = {name.rpartition(".")[2] for name in adapter_tensors(module.transformer)}
    assert names == {"weight", "singular_values", "initial"}
