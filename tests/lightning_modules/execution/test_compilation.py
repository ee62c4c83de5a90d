"""Compiled blocks: the same bits, and few graphs."""

from functools import partial

import pytest
import torch
from hydra.utils import instantiate
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

from lightning_modules.execution import blocks as execution
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.quantization import eight_bit, linear
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.pictures import make_pairs
from tests.support.steps import assert_same, made, step, with_a_block_of_each_kind
from tests.support.tiny_adapters import batch, build


@pytest.fixture
def exactly(monkeypatch):
    """Compile for kernels that are eager's own, so that results can be compared in their bits."""
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("adapter", "base", "position"),
    first(1, [("tlora", "fp8", "selective"), ("lora", "bf16", "full")]),
)
def test_compiled_blocks_give_the_same_bits(tiny, exactly, adapter, base, position):
    plain = step(with_a_block_of_each_kind(made(tiny, adapter, base)))
    compiled = ["model.compile=true", f"model.gradient_checkpointing={position}"]
    module = with_a_block_of_each_kind(made(tiny, adapter, base, *compiled))
    assert_same(step(module), plain)
    assert counters["stats"]["unique_graphs"] > 0


def test_one_graph_serves_all_sizes_where_there_are_several(tiny, pairs, tmp_path):
    """Else the graphs, and by them the rounding, would depend on which size came first: a resumed run's is another."""
    mixed = make_pairs(tmp_path / "mixed", [(32, 32), (48, 32), (32, 48)])
    for root, batch_size, expected in ((pairs, 1, True), (pairs, 3, True), (mixed, 1, False)):
        cfg = compose("train", "data=pairs", f"data.root={root}", f"data.batch_size={batch_size}")
        data = instantiate(cfg.data)
        module = build(tiny, "lora")
        data.configure_for(module)
        data.scan()
        assert data.is_uniform(partial(module.prompt_shapes, module.base.source.config())) == expected


def test_rounding_to_fp8_has_few_graphs_in_training_and_pictures(tiny, monkeypatch):
    """It uses a GPU's compiled rounding on all layers; beyond its limit of graphs it would silently be slow."""
    monkeypatch.setattr(eight_bit, "has_tensor_cores", lambda *_: True)
    monkeypatch.setattr(linear, "FUSES", ("cpu",))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    linear._compiled.cache_clear()
    module = made(tiny, "lora", "fp8", "model.quantization.modules_to_not_convert=[]")
    for position in ("none", "full"):
        set_checkpointing(module.transformer, position, module.adapter.bind_rank_mask)
        for t in ([0.2, 0.7], [0.5], [0.1, 0.2, 0.3]):
            step(module, t)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), module.adapter.in_dtype(module.transformer.eval(), torch.bfloat16):
            for samples in (1, 2):
                x_t, controls, prompt = tree_map(torch.Tensor.bfloat16, batch(samples))
                module.denoise(x_t, torch.full((samples,), 0.5), controls, prompt)
    linear._compiled.cache_clear()
    torch._dynamo.reset()
    # For products, gradients and transposes; in inference mode tensors are of another kind.
    assert counters["stats"]["unique_graphs"] == 4
