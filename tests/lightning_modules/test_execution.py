"""However a step is executed, its loss and gradients are the same: checkpointed, compiled, offloaded, cut."""

import logging
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from hydra.utils import instantiate
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

from datamodules.errors import UserError
from lightning_modules.adapters.adapter import trainable
from lightning_modules.estimation.fake_tensors import as_on_cuda
from lightning_modules.execution import kernels as execution
from lightning_modules.execution.block_offload import blocks
from lightning_modules.execution.checkpointing import POSITIONS, read_position
from lightning_modules.execution.last_block import LastBlock
from lightning_modules.quantization import fp8 as float8
from lightning_modules.quantization import linear as quantized_linear
from tests.conftest import compose, make_pairs
from tests.support.tiny_adapters import batch, build, gradients, learn, velocity
from tests.support.tiny_pipelines import MODELS

BASES = {
    "bf16": [],
    "fp8": ["model/quantization=fp8"],
    "nf4": ["model/quantization=fp4", "model.quantization.format=nf4"],
    "fp4": ["model/quantization=fp4"],
    "int8": ["model/quantization=fp8", "model.quantization.format=int8"],
    "quanto": ["model/quantization=fp8", "model.quantization.backend=quanto"],
}


@pytest.fixture
def exactly(monkeypatch):
    """Compile for kernels that are eager's own, so that results can be compared in their bits."""
    monkeypatch.setattr(execution.torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def made(tiny, adapter, base, *more):
    settings = [*BASES[base], "model.gradient_checkpointing=none", *more]
    module = build(tiny, adapter, *settings, dtype="bfloat16")
    learn(module)
    return module


def step(module, t=(0.2, 0.7)):
    """Loss and gradients under autocast."""
    module.transformer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = velocity(module, list(t)).float().square().mean()
    loss.backward()
    return {"loss": loss.detach(), **gradients(module)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert len(one) > 20
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("adapter", ["lora", "tlora"])
def test_every_position_of_the_dial_gives_the_same_bits(tiny, adapter, base):
    module = made(tiny, adapter, base, "adapter.target_modules=all-linear")
    plain = step(module)
    for position in (*POSITIONS, "every_3"):
        module.set_gradient_checkpointing(module.transformer, position)
        assert_same(step(module), plain)


@pytest.mark.parametrize(
    ("adapter", "base", "position"),
    [
        ("lora", "bf16", "none"),
        ("tlora", "bf16", "full"),
        ("tlora", "fp8", "selective"),
        ("lora", "fp8", "every_2"),
        ("tlora", "nf4", "none"),
        ("lora", "fp4", "full"),
        ("tlora", "int8", "full"),
        ("lora", "quanto", "none"),
    ],
)
def test_compiled_blocks_give_the_same_bits(tiny, exactly, adapter, base, position):
    plain = step(made(tiny, adapter, base))  # of layers outside the blocks the order would be another that adds up
    module = made(tiny, adapter, base, "model.compile=true", f"model.gradient_checkpointing={position}")
    assert_same(step(module), plain)
    assert counters["stats"]["unique_graphs"] > 0


def with_a_block_of_each_kind(module):
    """To compile less."""
    transformer = module.transformer
    del transformer.transformer_blocks[1:]
    del transformer.single_transformer_blocks[:-1]
    learn(module)
    return module


def test_compiled_by_inductor_differs_by_rounding(tiny):
    """float32, T-LoRA, all blocks computed again: 1e-4 of the largest gradient of a layer."""
    torch._dynamo.reset()
    plain = with_a_block_of_each_kind(build(tiny, "tlora", "model.gradient_checkpointing=none"))
    compiled = with_a_block_of_each_kind(build(tiny, "tlora", "model.gradient_checkpointing=full"))
    execution.compile_blocks(compiled.transformer, dynamic=None)
    results = []
    for module in (plain, compiled):
        loss = velocity(module, [0.2, 0.7]).square().mean()
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(module)})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def sized(module, height):
    """A step on pictures of another height."""
    x_t, controls, prompt = batch()
    x_t, controls = torch.randn(2, 8, height, 6), [torch.randn(2, 8, height, 6) for _ in controls]
    module.velocity(x_t, torch.tensor([0.2, 0.7]), controls, prompt).square().mean().backward()


@pytest.mark.parametrize(("dynamic", "more_a_size"), [(True, 0), (False, 1)])
def test_graphs_are_no_more_than_kinds_of_blocks_times_sizes(tiny, exactly, dynamic, more_a_size):
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
    for root, batch_size, expected in ((pairs, 1, True), (pairs, 4, True), (pairs, 3, False), (mixed, 1, False)):
        cfg = compose("train", "data=pairs", f"data.root={root}", f"data.batch_size={batch_size}")
        data = instantiate(cfg.data)
        module = build(tiny, "lora")
        data.serve(module)
        data.scan()
        assert data.is_uniform(module) == expected


def test_rounding_to_fp8_has_few_graphs_in_training_and_pictures(tiny, monkeypatch):
    """By the compiled rounding of a GPU, on all layers: with its graphs used up it would be slow, and say nothing."""
    monkeypatch.setattr(quantized_linear, "has_tensor_cores", lambda *_: True)
    monkeypatch.setattr(float8, "FUSES", ("cpu",))
    monkeypatch.setattr(float8.torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    float8._fused_rows.cache_clear()
    module = made(tiny, "lora", "fp8", "model.quantization.modules_to_not_convert=[]")
    for position in ("none", "full"):
        module.set_gradient_checkpointing(module.transformer, position)
        for t in ([0.2, 0.7], [0.5], [0.1, 0.2, 0.3]):
            step(module, t)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), module.adapter.in_dtype(module.transformer.eval(), torch.bfloat16):
            for samples in (1, 2):
                x_t, controls, prompt = tree_map(torch.Tensor.bfloat16, batch(samples))
                module.velocity(x_t, torch.full((samples,), 0.5), controls, prompt)
    float8._fused_rows.cache_clear()
    torch._dynamo.reset()
    # For products and for gradients; in inference mode tensors are of another kind.
    assert counters["stats"]["unique_graphs"] == 3


def inputs(module, samples=2):
    """x_t, t, controls and prompt of any family; where the text has a mask, one sample's ends early."""
    generator = torch.Generator().manual_seed(1)
    channels = module.transformer.config.in_channels // 4
    controls = [] if module.condition_images.most == 0 else [(8, 8)]
    x_t, *controls = (torch.randn(samples, channels, *size, generator=generator) for size in ((8, 12), *controls))
    shapes = module.prompt_shapes("make it snow", [(32, 32)] * len(controls))
    prompt = {name: torch.randn(samples, *shape, generator=generator) for name, shape in shapes.items()}
    if "pooled_prompt_embeds" not in prompt:
        mask = torch.ones(prompt["prompt_embeds"].shape[:2], dtype=torch.bool)
        mask[-1, -3:] = False
        prompt["prompt_embeds_mask"] = mask
    return x_t, torch.linspace(0.2, 0.7, samples), controls, prompt


def family(repositories, model, *more):
    """A family's module with an adapter on every layer, in float32."""
    path = f"model.pretrained_model_name_or_path={repositories[model]}"
    settings = [path, "model.dtype=float32", "adapter.rank=4", "adapter.target_modules=all-linear", *more]
    module = instantiate(compose("train", f"model={model}", *settings).model, _convert_="all")
    module.configure_model()
    learn(module)
    return module


@pytest.mark.parametrize("model", MODELS)
def test_last_block_for_the_target_alone_gives_the_same_loss_and_gradients(repositories, model):
    """To rounding: matrix products of other shapes add in another order."""
    module = family(repositories, model)
    last = list(blocks(module.transformer).values())[-1]
    assert isinstance(last.forward, LastBlock)
    results = []
    for cut in (True, False):
        module.transformer.zero_grad()
        if not cut:
            last.forward = last.forward.whole
        loss = module.velocity(*inputs(module)).square().mean()
        loss.backward()
        of_layers = {name: p.grad for name, p in trainable(module.transformer).items() if p.grad is not None}
        results.append({"loss": loss.detach(), **of_layers})
    for name, own in results[0].items():
        torch.testing.assert_close(own, results[1][name], rtol=1e-4, atol=1e-6)
    # What reaches only the text that is cut away has no gradient, or one of zeros.
    assert all(not gradient.any() for name, gradient in results[1].items() if name not in results[0])


@pytest.fixture(params=[(model, adapter) for model in MODELS for adapter in ("lora", "full")], ids="-".join)
def in_bf16(repositories, request):
    """A family's module as it trains, every layer of it."""
    model, adapter = request.param
    every = ["adapter.target_modules=all-linear"] if adapter == "lora" else []
    path = f"model.pretrained_model_name_or_path={repositories[model]}"
    settings = [f"model={model}", path, "model.dtype=bfloat16", f"adapter={adapter}", *every]
    module = instantiate(compose("train", *settings).model, _convert_="all")
    module.configure_model()
    return module


def test_all_that_ddp_waits_for_has_a_gradient(in_bf16):
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16.velocity(*inputs(in_bf16)).square().mean().backward()
    waited_for = {name: p for name, p in in_bf16.named_parameters() if p.requires_grad}
    for name in in_bf16._ddp_params_and_buffers_to_ignore:
        waited_for.pop(name, None)
    assert len(waited_for) > 20
    assert not [name for name, parameter in waited_for.items() if parameter.grad is None]


def test_kernels_of_attention_get_one_dtype(in_bf16):
    """Where norms are in float32, as under CUDA's autocast: of all families, in every block."""
    seen = []
    with as_on_cuda(torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        fused = F.scaled_dot_product_attention

        def observed(query, key, value, **_):
            seen.append({query.dtype, key.dtype, value.dtype})
            return fused(query, key, value)

        with mock.patch.object(F, "scaled_dot_product_attention", observed):  # undone before what it is within
            in_bf16.velocity(*inputs(in_bf16))
    assert seen == [{torch.bfloat16}] * len(blocks(in_bf16.transformer))


def test_casting_inputs_once_changes_no_bit(tiny):
    module = made(tiny, "lora", "bf16")
    once = step(module)
    for block in list(blocks(module.transformer).values())[:-1]:
        assert len(block.attn._forward_pre_hooks) == 1
        block.attn._forward_pre_hooks.clear()
    assert_same(once, step(module))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.attention_backend=fast"], "model.attention_backend=fast: diffusers has .*native"),
        (["model.attention_backend=sage"], "sage has no backward pass: use it in prediction"),
        (
            ["model.compile=true", "model/quantization=fp8", "model.quantization.backend=torchao"],
            "model.compile does not go with model.quantization.backend=torchao",
        ),
    ],
)
def test_what_cannot_be_is_named(tiny, settings, message):
    path = f"model.pretrained_model_name_or_path={tiny}"
    module = instantiate(compose("train", "model=flux_kontext", path, *settings).model, _convert_="all")
    with pytest.raises(UserError, match=message):
        module.preflight()


def test_kernel_that_is_not_there_is_named(tiny):
    with pytest.raises(UserError, match="cannot be used here"):
        build(tiny, "lora", "model.attention_backend=flash")


@pytest.mark.parametrize("setting", ["some", "every_0", "2"])
def test_what_is_no_position_of_the_dial_is_named(setting):
    with pytest.raises(UserError, match="choose none, selective, every_2"):
        read_position(setting)


def test_what_multiplies_fp8_layers_is_said(tiny, caplog):
    caplog.set_level(logging.INFO, "retouch")
    said = {}
    for base in ("fp8", "bf16"):
        caplog.clear()
        made(tiny, "lora", base)
        said[base] = {line for line in caplog.messages if "fp8:" in line}  # once or, by several handlers, more often
    assert said == {"fp8": {"fp8: weights only: its tensor cores are not used here"}, "bf16": set()}


def test_attention_backend_is_the_dispatcher_s(tiny):
    plain, chosen = (build(tiny, "lora", *more) for more in ([], ["model.attention_backend=_native_math"]))
    torch.testing.assert_close(velocity(plain, [0.5]), velocity(chosen, [0.5]))
    assert {str(b.attn.processor._attention_backend.value) for b in blocks(chosen.transformer).values()} == {
        "_native_math"
    }
    assert _AttentionBackendRegistry._active_backend == AttentionBackendName.NATIVE, "others are as before"
