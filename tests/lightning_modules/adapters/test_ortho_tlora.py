"""Orthogonal components: where they start, what they compute, their files."""

import pytest
import torch

from foundation.errors import UserError
from lightning_modules.adapters import tlora
from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.adapters.tlora import random_singular_values
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import write
from tests.support.same_adapters import adapter_state
from tests.support.tiny_adapters import LAYER, RANK, build, export, learn, velocity


@pytest.mark.parametrize("autocast", [False, True])
def test_orthogonal_adapter_starts_at_exactly_zero(tiny, autocast):
    module = build(tiny, "ortho_tlora", "adapter.target_modules=all-linear")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fresh = velocity(module, [0.1, 0.7])
        module.transformer.disable_adapters()
        assert torch.equal(fresh, velocity(module, [0.1, 0.7]))


def test_orthogonal_adapter_starts_from_the_last_singular_triples(tiny):
    module = build(tiny, "ortho_tlora", "adapter.target_modules=all-linear")
    rectangular = 0
    for layer in lora_layers(module.transformer, ADAPTER).values():
        q, p = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        values = layer.lora_A[ADAPTER].singular_values
        torch.testing.assert_close(q @ q.T, torch.eye(RANK), rtol=0, atol=1e-5)
        torch.testing.assert_close(p.T @ p, torch.eye(RANK), rtol=0, atol=1e-5)
        every = random_singular_values(layer.out_features, layer.in_features) / RANK
        assert (every.diff() <= 0).all()
        assert torch.equal(values, every[-RANK:])
        rectangular += layer.in_features != layer.out_features
    assert rectangular > 3


@pytest.mark.parametrize("sides", [(256, 256), (400, 100)])
def test_random_singular_values_are_those_of_independent_normal_entries(sides):
    """Marchenko and Pastur: between |sqrt(rows) - sqrt(columns)| and sqrt(rows) + sqrt(columns)."""
    values = random_singular_values(*sides)
    rows, columns = (side**0.5 for side in sides)
    assert values[0] == pytest.approx(rows + columns, rel=0.1)
    assert values[-1] == pytest.approx(rows - columns, rel=0.1, abs=1)


@pytest.fixture
def large_values(monkeypatch):
    """Start from singular values next to which what is learned is small."""
    monkeypatch.setattr(tlora, "random_singular_values", lambda *sides: torch.full((min(sides),), 16.0))


def test_rank_above_the_number_of_singular_values_is_refused(tiny):
    with pytest.raises(UserError, match=r"adapter.rank=65: transformer_blocks.0.attn.to_\w+ has 64 singular values"):
        build(tiny, "ortho_tlora", "adapter.rank=65")


def test_small_change_of_an_orthogonal_adapter_survives_bf16(tiny, large_values):
    """The difference of two bf16 products would have an error of 2**-9 of what cancels, here 50 times the change."""
    module = build(tiny, "ortho_tlora", "adapter.rank_schedule=constant")
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


def test_orthogonal_file_is_the_exact_lora_of_twice_the_rank_its_components_in_pairs(tiny, tmp_path):
    module = build(tiny, "ortho_tlora")
    learn(module)
    export(module, tmp_path / "x.safetensors")
    update = LoRAFile(tmp_path / "x.safetensors").read(LayerNames(module.transformer), "tiny")[LAYER]
    layer = module.transformer.get_submodule(LAYER)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    a, b = update.down, update.up / (6 / RANK)
    assert (a.shape, b.shape) == ((2 * RANK, 64), (64, 2 * RANK))
    for r in range(RANK + 1):
        dense = (up.weight[:, :r] * down.singular_values[:r]) @ down.weight[:r] - up.initial[:, :r] @ down.initial[:r]
        torch.testing.assert_close(b[:, : 2 * r] @ a[: 2 * r], dense.detach(), rtol=1e-5, atol=1e-5)


def test_init_from_a_file_in_bf16_keeps_a_small_change(tiny, tmp_path, large_values):
    module = build(tiny, "ortho_tlora")
    learn(module, spread=1e-4)
    updates = module.adapter.deltas(module.transformer)
    write(tmp_path / "x.safetensors", updates, {"adapter": module.adapter.metadata()}, torch.bfloat16)
    again = build(tiny, "ortho_tlora", f"adapter.init_from={tmp_path / 'x.safetensors'}")
    for name, exact in adapter_state(module.transformer).items():
        got = adapter_state(again.transformer)[name]
        assert (got - exact).norm() < 0.004 * exact.norm(), name
