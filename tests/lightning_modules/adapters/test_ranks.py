"""Ranks, scales and learning rates by layer, against peft's own."""

import math
from types import SimpleNamespace

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from peft import LoraConfig
from peft.optimizers import create_loraplus_optimizer

from foundation.errors import UserError
from lightning_modules.adapters.adapter import TrainedParts, trainable
from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.adapters.targets import Ranks
from lightning_modules.lora_files.reading import LoRAFile
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.tiny_adapters import build, export, learn, velocity

PATTERNS = [
    "adapter.rank_pattern={transformer_blocks.*:2,transformer_blocks.1.*:3}",
    "adapter.alpha_pattern={*.to_v:1.5}",
]


def build_unloaded(tiny, *settings):
    composed = compose("train", "model=flux_kontext", "model.dtype=float32", "adapter.rank=4", *settings)
    return instantiate(composed.model, pretrained_model_name_or_path=str(tiny), max_sequence_length=16)


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_by_pattern_are_as_peft_has_them(tiny, stock, rslora):
    module = build(tiny, "lora", *PATTERNS, f"adapter.use_rslora={rslora}")
    learn(module)
    layers = lora_layers(module.transformer, ADAPTER)
    ranks = {name: 3 if ".1." in name else 2 for name in layers if name.startswith("transformer_blocks")}
    patterns = {"rank_pattern": {f"^{name}": rank for name, rank in ranks.items()}, "alpha_pattern": {"to_v": 1.5}}
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, target_modules=list(layers), **patterns)
    stock.transformer.add_adapter(config)
    theirs = lora_layers(stock.transformer, "default")
    for name, layer in layers.items():
        assert layer.r[ADAPTER] == theirs[name].r["default"] == ranks.get(name, 4)
        assert layer.scaling[ADAPTER] == theirs[name].scaling["default"]
        alpha, rank = 1.5 if name.endswith("to_v") else 6, ranks.get(name, 4)
        assert layer.scaling[ADAPTER] == alpha / (math.sqrt(rank) if rslora else rank)
        assert module.adapter.ranks.scale_of(name) == layer.scaling[ADAPTER]


@pytest.mark.parametrize("adapter", first(2, ["ortho_tlora", "tlora", "lora", "dora"]))
def test_file_with_scales_by_layer_starts_another_run_unchanged(tiny, tmp_path, adapter):
    more = [PATTERNS[1], "adapter.use_rslora=true", *(PATTERNS[:1] if adapter in ("lora", "dora") else [])]
    module = build(tiny, adapter, *more)
    learn(module)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    export(module, path)
    file = LoRAFile(path)
    layers = lora_layers(module.transformer, ADAPTER)
    assert all(
        Ranks.of_file(file).scale_of(name) == pytest.approx(layer.scaling[ADAPTER]) for name, layer in layers.items()
    )
    with torch.no_grad():
        again = build(tiny, adapter, *more, f"adapter.init_from={path}")
        other = build(tiny, adapter, *more[2:], f"adapter.init_from={path}")
        wanted = velocity(module, [0.4])
        torch.testing.assert_close(velocity(again, [0.4]), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(velocity(other, [0.4]), wanted, rtol=1e-4, atol=1e-5)


def test_a_layer_whose_name_ends_other_names_is_adapted_without_them(tiny):
    module = build(tiny, "lora", "adapter.target_modules='proj_out'")
    assert list(lora_layers(module.transformer, ADAPTER)) == ["proj_out"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("adapter.rank_pattern={nothing:2}", "adapter.rank_pattern={nothing:2} matches no layer"),
        ("adapter.alpha_pattern={*.to_x:2}", "It has transformer_blocks.*, single_transformer_blocks.*"),
        ("adapter.lr_pattern={blocks:2}", "adapter.lr_pattern={blocks:2} matches no layer"),
        ("adapter.rank=1000000", "adapter.rank=1000000: "),
        ("adapter.rank_pattern={*.to_q:640}", "adapter.rank_pattern: 640: the layers with this rank allow at most "),
        ("adapter=tlora adapter.rank_pattern={*:2}", "a T-LoRA's schedule has one rank"),
        ("optimizer=prodigy adapter.lora_plus_ratio=4", "Prodigy finds one learning rate"),
    ],
)
def test_incompatible_settings_are_refused_before_weights_are_read(tiny, setting, message):
    with pytest.raises((UserError, InstantiationException)) as caught:
        build_unloaded(tiny, *setting.split()).check()
    assert message in str(caught.value)


def rates(optimizer, names):
    return {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


def configured(module):
    found = module.configure_optimizers()
    return found["optimizer"] if isinstance(found, dict) else found


def test_lora_plus_is_pefts(tiny):
    settings = ["adapter.lora_plus_ratio=16", "optimizer.lr=1e-3", "optimizer.weight_decay=0.1", "scheduler=constant"]
    states = []
    for by_peft in (False, True):
        module = build(tiny, "lora", *settings)
        names = {parameter: name for name, parameter in trainable(module.transformer).items()}
        optimizer = configured(module)
        if by_peft:
            ours = rates(optimizer, names)
            more = {"lr": 1e-3, "loraplus_lr_ratio": 16, "loraplus_weight_decay": 0.1, "fused": True}
            optimizer = create_loraplus_optimizer(module.transformer, torch.optim.AdamW, **more)
            assert rates(optimizer, names) == ours
        for _ in range(3):
            velocity(module, [0.2, 0.7]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append({name: parameter.detach() for parameter, name in names.items()})
    torch.testing.assert_close(*states, rtol=1e-6, atol=1e-8)


def test_learning_rates_by_pattern_follow_the_schedule(tiny):
    pattern = "adapter.lr_pattern={single_*:0.5,*.to_v:3}"
    module = build(tiny, "dora", pattern, "adapter.lora_plus_ratio=2", "optimizer.lr=1e-2", "scheduler=cosine")
    found = module.configure_optimizers()
    optimizer, scheduler = found["optimizer"], found["lr_scheduler"]["scheduler"]
    names = {parameter: name for name, parameter in trainable(module.transformer).items()}

    def factor(name):
        layer = name.partition(".lora_")[0]
        usual = 3 if layer.endswith("to_v") else 0.5 if layer.startswith("single_") else 1
        return usual * (2 if ".lora_B." in name else 1)

    optimizer.step()
    scheduler.step()
    assert rates(optimizer, names).keys() == set(names.values())
    lr = optimizer.param_groups[0]["lr"]
    assert 0 < lr < 1e-2
    for name, rate in rates(optimizer, names).items():
        assert rate == pytest.approx(lr * factor(name))


@pytest.mark.parametrize(
    "optimizer",
    first(2, ["adamw", "muon", "adamw_8bit", "paged_adamw_8bit", "adamw_schedule_free", "adafactor"]),
)
def test_each_optimizer_learns_by_its_groups_rates(tiny, optimizer):
    """A parameter of rate r moves as one alone by an optimizer of that rate."""
    made = build_unloaded(tiny, f"optimizer={optimizer}", "optimizer.lr=1e-2").optimization.optimizer
    start = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    grads = [torch.randn(64, 64) for _ in range(3)]

    def moved(*factors):
        parameters = [torch.nn.Parameter(start.clone()) for _ in factors]
        optimization = build_unloaded(tiny, "scheduler=constant", f"optimizer={optimizer}").optimization
        optimization.optimizer = made
        adapter = SimpleNamespace(lr_factor=lambda name: factors[int(name)])
        trained = TrainedParts(adapter, torch.nn.ParameterList(parameters), torch.nn.ModuleDict())
        steps = optimization.configure(trained, sharded=False)
        steps = steps["optimizer"] if isinstance(steps, dict) else steps
        for grad in grads:
            for parameter in parameters:
                parameter.grad = grad.clone()
            steps.step()
        return parameters

    one, other = moved(1.0, 4.0)
    torch.testing.assert_close(one, moved(1.0)[0])
    torch.testing.assert_close(other, moved(4.0)[0])
    assert (other - start).norm() > 2 * (one - start).norm()
