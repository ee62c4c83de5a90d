"""A T-LoRA at one rank."""

import pytest
import torch

from lightning_modules.adapters.constant_rank import ActiveRanks
from lightning_modules.adapters.low_rank import LowRank
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.adapters.rank_mask import RankGate
from lightning_modules.adapters.rank_schedule import RankSchedule
from tests.support.lora_files import dense
from tests.support.tiny_adapters import ADAPTERS, LAYER, RANK, build, learn


def ranks_of(schedule, timesteps, width=1):
    return ActiveRanks.of(RankGate(schedule, width), torch.tensor(timesteps))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_first_components_are_what_the_mask_leaves(tiny, adapter):
    """At a timestep of each rank, in a layer's own forward: of an orthogonal T-LoRA a component is two rows."""
    module = build(tiny, adapter)
    learn(module)
    [gate] = module.rank_gates
    timesteps = [1000.0, 600.0, 300.0, 0.0]
    ranks = ActiveRanks.of(gate, torch.tensor(timesteps))
    updates = module.adapter.updates(module.transformer)
    assert sorted(set(ranks.ranks.tolist())) == [1, 2, 3, RANK]
    layer = lora_layers(module.transformer)[LAYER]
    x = torch.randn(1, 5, layer.in_features)
    for timestep, rank in zip(timesteps, ranks.ranks.tolist(), strict=True):
        gate.open(torch.tensor([timestep]), None, torch.float32)
        own = layer(x) - layer.base_layer(x)
        torch.testing.assert_close(own, ranks.first(updates, rank)[LAYER].apply(x), rtol=1e-4, atol=1e-5)
        if rank < RANK:
            assert not torch.allclose(own, ranks.first(updates, rank + 1)[LAYER].apply(x), atol=1e-3)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_difference_is_that_of_whole_matrices(width, rank):
    schedule = RankSchedule("timestep", 4, 1, 1.0)
    ranks = ranks_of(schedule, [1000.0, 700.0, 400.0, 200.0, 0.0], width)
    assert ranks.ranks.tolist() == [1, 1, 2, 3, 4]
    assert ranks.mean == pytest.approx(2.2)
    updates = {name: LowRank(torch.randn(4 * width, 9), torch.randn(7, 4 * width)) for name in "ab"}
    shares = []
    for active in ranks.ranks.tolist():
        there, here = ([dense(one) for one in ranks.first(updates, r).values()] for r in (active, rank))
        away = torch.cat([one - other for one, other in zip(there, here, strict=True)]).norm()
        shares.append(float(away / torch.cat(there).norm()))
    assert ranks.difference(updates, rank) == pytest.approx(sum(shares) / 5, rel=1e-6)


def test_difference_where_no_component_works_is_the_whole():
    ranks = ranks_of(RankSchedule("timestep", 4, 0, 1.0), [1000.0, 0.0])
    assert ranks.ranks.tolist() == [0, 4]
    updates = {"a": LowRank(torch.randn(4, 9), torch.randn(7, 4))}
    assert ranks.difference(updates, 4) == pytest.approx(0.5)


def test_steps_of_the_sampling_decide_and_not_the_timesteps_alone():
    ranks = ranks_of(RankSchedule("step_index", 5, 1, 1.0), [1000.0, 999.0, 998.0, 997.0, 996.0])
    assert ranks.ranks.tolist() == [1, 2, 3, 4, 5]
