"""Compiled blocks: the same bits, few graphs, and what a run compiles by itself."""

import logging
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from hydra.utils import instantiate
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.execution.compilation import EARNED, compile_blocks, compiles, expected_graphs
from tests.support.combinations import first
from tests.support.commands import compose
from tests.support.objectives import EVERYTHING, gradients, latent_batch
from tests.support.pictures import make_pairs
from tests.support.steps import assert_same, inputs, made, step, with_a_block_of_each_kind
from tests.support.tiny_adapters import build, learn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def exactly(monkeypatch):
    """Compile for eager's own kernels, whose results can be compared bit by bit; backward passes become graphs, too."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


OTHERS = [("loha", "nf4"), ("lokr", "fp8"), ("dora", "int8_w8a8"), ("lora", "rotated")]


@pytest.mark.parametrize(
    ("adapter", "base", "policy"),
    first(1, [*(("tlora", "fp8", policy) for policy in reversed(POLICIES)), *((*one, "attention") for one in OTHERS)]),
)
def test_compiled_blocks_give_the_same_bits(tiny, exactly, adapter, base, policy):
    plain = step(with_a_block_of_each_kind(made(tiny, adapter, base)))
    module = with_a_block_of_each_kind(made(tiny, adapter, base))
    module.execution.compiles = True
    module.execution.set_checkpointing(module.transformer, policy)
    assert_same(step(module), plain)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_dropout_is_drawn_once_for_a_compiled_block(tiny, monkeypatch):
    """A recomputed block has the dropout mask of its forward pass."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    found = []
    for policy in ("none", "full"):
        module = with_a_block_of_each_kind(made(tiny, "lora", "float32", "adapter.dropout=0.5"))
        module.train()
        compile_blocks(module.transformer, False, policy, module.execution.recomputed)
        torch.manual_seed(0)
        found.append(step(module))
    assert_same(*found)


@pytest.mark.slow
def test_blocks_of_a_kind_share_a_graph_and_sizes_share_it(tiny, exactly):
    """A set of photographs in four sizes compiles what a set in two does."""
    module = build(tiny, "lora", "model.gradient_checkpointing=none")
    for of_a_kind in (module.transformer.transformer_blocks, module.transformer.single_transformer_blocks):
        of_a_kind.insert(0, deepcopy(of_a_kind[0]))
    learn(module)
    compile_blocks(module.transformer, True, "attention", module.execution.recomputed)
    counts = []
    for width in (8, 12, 20, 26):
        module.denoise(*inputs(module, samples=1, width=width)).square().mean().backward()
        counts.append(counters["stats"]["unique_graphs"])
    # Double and single blocks, the former without and with a gradient of their inputs.
    assert counts[0] == expected_graphs(module.transformer, True, 0) == 3
    assert counts[-1] <= expected_graphs(module.transformer, False, 0)
    assert counts[-1] == counts[1] <= counts[0] + 1, counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "settings", "forwards"),
    [
        *(("tlora", [], 0), ("lora", ["objective=slider"], 0), ("lora", ["objective.contrastive_guidance=3"], 1)),
        *(("tlora", EVERYTHING, 2), ("lora", ["objective=dpo"], 1)),
    ],
)
def test_graphs_are_as_many_as_expected(tiny, monkeypatch, adapter, settings, forwards):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    module = made(tiny, adapter, "float32", *settings)
    assert module.objective.needs_base + module.objective.needs_empty_prompt == forwards
    compile_blocks(module.transformer, False, "attention", module.execution.recomputed)
    for draw in range(2):
        gradients(module, latent_batch([draw], rejected="objective=dpo" in settings))
    torch._dynamo.reset()
    expected = expected_graphs(module.transformer, True, forwards)
    assert expected - 1 <= counters["stats"]["unique_graphs"] <= expected


@pytest.mark.parametrize(
    ("setting", "device", "passes", "deterministic", "expected"),
    [
        ("auto", CUDA, 3 * EARNED, False, True),
        ("auto", CUDA, 3 * EARNED - 1, False, False),
        ("auto", CUDA, 3 * EARNED, True, False),
        ("auto", CPU, 10**6, False, False),
        (True, CPU, 1, True, True),
        (False, CUDA, 10**6, False, False),
    ],
)
def test_auto_compiles_long_runs_on_cuda(monkeypatch, setting, device, passes, deterministic, expected):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert compiles(setting, device, passes, graphs=3) is expected


# Adapters and objectives, most with state that is set for a single forward; a policy, the number of streamed blocks.
STATEFUL = [
    ("tlora", ["objective=slider"], "attention", 0),
    ("lora", ["objective=slider"], "full", 1),
    ("tlora", EVERYTHING, "full", 0),
    ("tlora", ["adapter.rank_schedule=normalised"], "full", 2),
    ("ortho_tlora", ["objective=slider"], "every_2", 0),
    ("ortho_tlora", [], "attention", 0),
    ("lora", ["objective=dpo"], "attention", 0),
    ("tlora", ["objective=dpo"], "none", 0),
    ("dora", [], "full", 1),
    ("lora", [], "every_2", 0),
    ("lokr", [], "attention", 0),
]


def fails(*_):
    raise RuntimeError("Cannot find a working triton installation.\nmore")


FAILURES = {
    None: "aot_eager",
    "first graph": fails,
    "backward graph": aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=fails),
    "recompile limit": "aot_eager",
}


@pytest.mark.parametrize(("adapter", "settings", "policy", "streamed"), first(2, STATEFUL))
@pytest.mark.parametrize("failure", FAILURES)
def test_blocks_that_cannot_be_compiled_train_on_with_a_note(
    tiny, monkeypatch, caplog, failure, adapter, settings, policy, streamed
):
    """The limit of graphs is reached between the first block of one kind and that of another."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=FAILURES[failure]))
    torch._dynamo.reset()
    latents = latent_batch(range(2), rejected="objective=dpo" in settings, masked=settings == EVERYTHING)
    more, found = [*settings, f"model.offload.blocks={streamed}", "model.gradient_checkpointing=full"], []
    for compiled in (False, True):
        module = made(tiny, adapter, "bf16", *more)
        module = module if streamed else with_a_block_of_each_kind(module)
        module.execution.compiles = compiled
        module.execution.set_checkpointing(module.transformer, policy)
        limit = torch._dynamo.config.patch(recompile_limit=1) if failure == "recompile limit" else nullcontext()
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)  # as Lightning's
        with limit, caplog.at_level(logging.WARNING, "retouch"), autocast:
            found.append([gradients(module, latents) for _ in range(2)])
    torch._dynamo.reset()
    for compiled, eager in zip(*found, strict=True):
        assert_same(compiled, eager)
    notes = [record.message for record in caplog.records if "cannot be compiled" in record.message]
    assert len(notes) == (failure is not None), notes
    cause = "recompile limit exceeded" if failure == "recompile limit" else "Cannot find a working triton installation."
    assert all(cause in note for note in notes)


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
