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
    yield from compiling(monkeypatch, "aot_eager")


@pytest.fixture
def counted(monkeypatch):
    """Make graphs, and run what is in them as it is."""
    yield from compiling(monkeypatch, "eager")


def compiling(monkeypatch, backend):
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("adapter", "base", "position"),
    first(1, [("tlora", "fp8", "selective"), ("lora", "bf16", "full"), ("tlora", "nf4", "none")]),
)
def test_compiled_blocks_give_the_same_bits(tiny, exactly, adapter, base, position):
    plain = step(with_a_block_of_each_kind(made(tiny, adapter, base)))
    compiled = ["model.compile=true", f"model.gradient_checkpointing={position}"]
    module = with_a_block_of_each_kind(made(tiny, adapter, base, *compiled))
    assert_same(step(module), plain)
    assert counters["stats"]["unique_graphs"] > 0


def sized(module, height):
    """Run a step on images of another height."""
    x_t, controls, prompt = batch()
    x_t, controls = torch.randn(2, 8, height, 6), [torch.randn(2, 8, height, 6) for _ in controls]
    module.denoise(x_t, torch.tensor([0.2, 0.7]), controls, prompt).square().mean().backward()


@pytest.mark.parametrize(("dynamic", "more_a_size"), [(True, 0), (False, 1)])
@pytest.mark.slow
def test_graphs_are_no_more_than_kinds_of_blocks_times_sizes(tiny, counted, dynamic, more_a_size):
    module = with_a_block_of_each_kind(build(tiny, "lora", "model.gradient_checkpointing=none"))
    execution.compile_blocks(module.transformer, dynamic)
    counts = []
    for height in (4, 8, 12, 4, 8):
        sized(module, height)
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[0] == 2
    assert counts == [counts[0] * (1 + more_a_size * number) for number in (0, 1, 2, 2, 2)]


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
