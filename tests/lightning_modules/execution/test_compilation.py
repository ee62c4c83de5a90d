"""Compiled blocks: the same bits, and few graphs."""

from functools import partial

import pytest
import torch
from hydra.utils import instantiate
from torch._dynamo.utils import counters

from lightning_modules.execution import blocks as execution
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.pictures import make_pairs
from tests.support.steps import assert_same, made, step, with_a_block_of_each_kind
from tests.support.tiny_adapters import build


@pytest.fixture
def exactly(monkeypatch):
    """Compile for kernels that are eager's own, so that results can be compared in their bits."""
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("adapter", "base"),
    first(1, [("tlora", "fp8"), ("loha", "nf4"), ("oft", "fp8"), ("dora", "int8_w8a8"), ("lora", "rotated")]),
)
def test_compiled_blocks_give_the_same_bits(tiny, exactly, adapter, base):
    plain = step(with_a_block_of_each_kind(made(tiny, adapter, base)))
    compiled = ["model.compile=true", "model.gradient_checkpointing=selective"]
    module = with_a_block_of_each_kind(made(tiny, adapter, base, *compiled))
    assert_same(step(module), plain)
    assert counters["stats"]["unique_graphs"] > 0


def test_one_graph_serves_all_sizes_where_there_are_several(tiny, pairs, tmp_path):
    """Otherwise graphs and rounding would depend on the first size, which differs in a resumed run."""
    mixed = make_pairs(tmp_path / "mixed", [(32, 32), (48, 32), (32, 48)])
    for root, batch_size, expected in ((pairs, 1, True), (pairs, 3, True), (mixed, 1, False)):
        cfg = compose("train", "data=pairs", f"data.root={root}", f"data.batch_size={batch_size}")
        data = instantiate(cfg.data)
        module = build(tiny, "lora")
        data.configure_for(module)
        data.scan()
        assert data.is_uniform(partial(module.prompt_shapes, module.base.source.config())) == expected
