"""task=export of T-LoRAs, whose rank follows the timestep: the file has one rank."""

import pytest
import torch
from hydra.utils import instantiate

from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.lora_files.reading import LoRAFile
from tests.support.commands import compose, run_task
from tests.support.lora_files import relative
from tests.support.tiny_adapters import ADAPTERS, LAYER, RANK, build, learn


@pytest.fixture
def names(tiny):
    module = instantiate(compose("train", "model=flux_kontext").model, pretrained_model_name_or_path=str(tiny))
    return module.base.layer_names


def read(path, names):
    return LoRAFile(path).read(names, "tiny")


def weights_of(run):
    return run / "lora" / "last" / "pytorch_lora_weights.safetensors"


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_first_components_equal_the_masked_lora(tiny, adapter):
    """Each rank is tested in a layer's own forward pass; a component of an orthogonal T-LoRA has two rows."""
    module = build(tiny, adapter)
    learn(module)
    [gate] = module.rank_gates
    timesteps = torch.tensor([1000.0, 600.0, 300.0, 0.0])
    ranks = gate.schedule.active_ranks(timesteps, timesteps).tolist()
    assert sorted(set(ranks)) == [1, 2, 3, RANK]
    delta, layer = module.adapter.deltas(module.transformer)[LAYER], lora_layers(module.transformer)[LAYER]
    x = torch.randn(1, 5, layer.in_features)
    for timestep, rank in zip(timesteps, ranks, strict=True):
        gate.open(timestep[None], None, torch.float32)
        own = layer(x) - layer.base_layer(x)
        torch.testing.assert_close(own, delta.first(rank * gate.width).apply(x), rtol=1e-4, atol=1e-5)
        if rank < RANK:
            assert not torch.allclose(own, delta.first((rank + 1) * gate.width).apply(x), atol=1e-3)


@pytest.mark.parametrize(("adapter", "rank"), [("tlora", 2), ("ortho_tlora", 4)])
def test_a_constant_rank_is_the_first_components_as_a_lora(gallery, names, tmp_path, adapter, rank):
    """A component of an orthogonal T-LoRA has two rows."""
    lora = gallery(adapter).folder
    run_task("export", f"lora={lora}", "rank=2", f"output_dir={tmp_path}")
    [path] = tmp_path.glob("*.safetensors")
    facts = LoRAFile(path).adapter
    assert ("rank_schedule" in facts, facts["rank"]) == (False, rank)
    expected = {name: delta.first(rank) for name, delta in read(weights_of(lora), names).items()}
    assert relative(expected, read(path, names)) < 1e-6


def test_the_rank_must_be_chosen_and_t_loras_are_not_added_up(refuses, gallery):
    one, other = gallery("tlora").folder, gallery("lora").folder
    proposed = "Pass rank=N, from 1, its rank at noise, to 4, the rank in programs that do not follow the schedule"
    for given in ([], ["rank=5"]):
        refuses("task=export", f"lora={one}", *given, words=proposed, script="predict")
    merge = "is a T-LoRA, and only plain LoRAs can be added up: write one by task=export rank=N first"
    refuses("task=export", f"merge=[{other},{one}]", "rank=2", words=merge, script="predict")


@pytest.mark.slow
def test_a_schedule_that_masks_nothing_needs_no_rank(runs, names, tmp_path):
    trained = runs(1, "adapter=ortho_tlora", "adapter.rank_schedule=constant").folder
    run_task("export", f"lora={trained}", f"output_dir={tmp_path}")
    [path] = tmp_path.glob("*.safetensors")
    assert relative(read(weights_of(trained), names), read(path, names)) < 1e-6
    facts = LoRAFile(path).adapter
    assert "rank_schedule" not in facts
    assert (facts["rank"], facts["alpha"]) == (8, 8.0)
