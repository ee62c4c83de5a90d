"""The mask of every forward: under checkpointing, compilation, in stock pipelines, and what refuses it."""

import math
from fractions import Fraction

import pytest
import torch
from diffusers import FluxKontextPipeline
from peft import LoraConfig

from foundation.errors import UserError
from lightning_modules.adapters.gates import RankGate, attach_rank_schedule
from lightning_modules.adapters.peft_layers import ADAPTER, lora_layers
from lightning_modules.adapters.rank_schedule import RankSchedule
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.lora_files.writing import write
from tests.support.combinations import first
from tests.support.tiny_adapters import LAYER, RANK, build, export, gradients, learn, load, picture, velocity


def test_forward_without_a_mask_is_an_error(tiny):
    module = build(tiny, "tlora")
    velocity(module, [0.5])
    with pytest.raises(UserError, match="ran without a rank mask: in diffusers call attach_rank_schedule"):
        module.transformer.get_submodule(LAYER)(torch.randn(1, 3, 64))


def test_dora_and_masks_refuse_each_other(stock):
    stock.transformer.add_adapter(LoraConfig(r=RANK, target_modules=["to_q"], use_dora=True))
    with pytest.raises(UserError, match="to_q is a DoRA layer"):
        RankGate(RankSchedule("timestep", RANK, 1, 1.0)).attach(stock.transformer, ADAPTER)


def test_merging_refuses_the_t_lora_and_no_other(tiny, tmp_path):
    stock = load(tiny, tmp_path, ["tlora"], ["lora", "adapter.target_modules=all-linear"])
    attach_rank_schedule(stock, tmp_path / "a", "a")
    stock.set_adapters(["a", "b"])
    own = build(tiny, "ortho_tlora").transformer.get_submodule(LAYER)
    for fuse in (stock.fuse_lora, stock.transformer.fuse_lora, own.merge):
        with pytest.raises(UserError, match="cannot be merged or fused: its rank follows the timestep"):
            fuse()
    assert not any(layer.merged for layer in lora_layers(stock.transformer).values()), "all or nothing"
    stock.fuse_lora(adapter_names=["b"])
    assert all(layer.merged_adapters == ["b"] for layer in lora_layers(stock.transformer).values())
    stock = load(tiny, tmp_path, ["tlora"])
    stock.fuse_lora()
    with pytest.raises(UserError, match="is fused already; a T-LoRA cannot be merged or fused"):
        attach_rank_schedule(stock, tmp_path / "a")


@pytest.mark.parametrize("kind", first(2, ["timestep", "step_index", "normalised", "constant"]))
def test_each_forward_of_a_stock_pipeline_has_the_rank_of_its_step(tiny, tmp_path, kind):
    """The formulas are applied to the scheduler's timesteps, also rounded to bf16, in both passes of true CFG."""
    stock = load(tiny, tmp_path, ["tlora", "adapter.rank=16", "adapter.min_rank=2", f"adapter.rank_schedule={kind}"])
    stock.to(torch.bfloat16)
    attach_rank_schedule(stock, tmp_path / "a")
    ranks = []
    layer = stock.transformer.get_submodule(LAYER)
    layer.lora_B["a"].register_forward_pre_hook(lambda _, args: ranks.append(int((args[0] != 0).any(dim=1).sum())))
    picture(stock, steps=7, true_cfg_scale=2.0, negative_prompt="y")
    t = [Fraction(float(timestep)) for timestep in stock.scheduler.timesteps]
    progress = {
        "timestep": [(1000 - now) / 1000 for now in t],
        "normalised": [(1000 - now) / (1000 - t[-1]) for now in t],
        "step_index": [Fraction(i, 6) for i in range(7)],
        "constant": [Fraction(1)] * 7,
    }[kind]
    expected = [math.floor(p * 14) + 2 for p in progress]
    assert ranks == [rank for rank in expected for _ in range(2)]
    assert len(set(ranks)) == (1 if kind == "constant" else 7)


def test_another_pipeline_on_the_same_transformer_cannot_count_steps(tiny, tmp_path):
    stock = load(tiny, tmp_path, ["tlora", "adapter.rank_schedule=step_index"])
    attach_rank_schedule(stock, tmp_path / "a")
    with pytest.raises(UserError, match="rank_schedule=step_index counts the steps of the FluxKontextPipeline"):
        picture(FluxKontextPipeline(**stock.components))


def test_attaching_a_schedule_names_the_mistake(tiny, tmp_path):
    plain, masked = build(tiny, "lora"), build(tiny, "tlora")
    for name, module in (("plain", plain), ("masked", masked)):
        export(module, tmp_path / name / "pytorch_lora_weights.safetensors")
    stock = FluxKontextPipeline.from_pretrained(tiny)
    with pytest.raises(UserError, match="no rank schedule: it is not a T-LoRA"):
        attach_rank_schedule(stock, tmp_path / "plain")
    stock.load_lora_weights(tmp_path / "masked", adapter_name="a")
    stock.load_lora_weights(tmp_path / "plain", adapter_name="b")
    with pytest.raises(UserError, match="that are loaded, a, b"):
        attach_rank_schedule(stock, tmp_path / "masked")
    with pytest.raises(UserError, match="adapter_name=c: name one of the adapters that are loaded, a, b"):
        attach_rank_schedule(stock, tmp_path / "masked", "c")


def test_header_holds_the_schedule_and_damaged_ones_are_refused(tiny, tmp_path):
    module = build(tiny, "ortho_tlora", "adapter.min_rank=2")
    export(module, tmp_path / "x.safetensors")
    schedule = LoRAFile(tmp_path / "x.safetensors").adapter["rank_schedule"]
    del schedule["note"]
    assert schedule == {"kind": "timestep", "rank": RANK, "min_rank": 2, "alpha_rank_scale": 1.0, "width": 2}
    header = {"adapter": {"rank_schedule": {"kind": "timestep", "rank": RANK}}}
    write(tmp_path / "x.safetensors", module.adapter.deltas(module.transformer), header)
    with pytest.raises(UserError, match=r"x\.safetensors has a rank schedule that this version of Retouch"):
        attach_rank_schedule(FluxKontextPipeline.from_pretrained(tiny), tmp_path / "x.safetensors")


@pytest.mark.parametrize(("adapter", "autocast"), [("tlora", False), ("ortho_tlora", True)])
def test_gradient_checkpointing_has_the_mask_of_its_forward_whatever_ran_in_between(tiny, adapter, autocast):
    """Another forward pass at another t runs between forward and backward, such as a sample image."""
    plain = build(tiny, adapter, "model.gradient_checkpointing=false")
    checkpointed = build(tiny, adapter, "model.gradient_checkpointing=true")
    for module in (plain, checkpointed):
        learn(module)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = velocity(module, [0.2, 0.6]).float().square().mean()
            with torch.no_grad():
                velocity(module, [0.95, 0.05])
        loss.backward()
    torch.testing.assert_close(gradients(plain), gradients(checkpointed), rtol=0, atol=0)
