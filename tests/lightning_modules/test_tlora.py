"""T-LoRA's layers against closed forms, its files against stock diffusers, its steps against plain ones."""

import math
from fractions import Fraction

import bitsandbytes
import pytest
import safetensors.torch
import torch
from diffusers import FluxKontextPipeline
from hydra.utils import instantiate
from peft import LoraConfig

from datamodules.batch import LatentBatch
from datamodules.errors import UserError
from lightning_modules.lora import ADAPTER, adapter_state, adapter_tensors, lora_layers, trainable
from lightning_modules.lora_files import read_adapter, read_weights, save_lora
from lightning_modules.rank_schedule import RankGate, RankSchedule, attach_rank_schedule, mask_forwards
from tests.conftest import compose

RANK = 4
ADAPTERS = ["tlora", "ortho_tlora"]
LAYER = "transformer_blocks.0.attn.to_q"


def build(tiny, adapter, *more, dtype="float32"):
    """A module with a fresh adapter, its forwards masked by each sample's t."""
    settings = [f"adapter={adapter}", f"adapter.rank={RANK}", "adapter.alpha=6", *more]
    module = instantiate(
        compose("train", "model=flux_kontext", f"model.dtype={dtype}", *settings).model,
        pretrained_model_name_or_path=str(tiny),
        max_sequence_length=16,
    )
    module.configure_model()
    if module.rank_gates:
        mask_forwards(module.transformer, module.rank_gates, module.sampling_step)
    return module


def learn(module, spread=0.1):
    """Let the weights be those of an adapter that has learned."""
    generator = torch.Generator().manual_seed(7)
    for parameter in trainable(module.transformer).values():
        parameter.data += spread * torch.randn(parameter.shape, generator=generator).to(parameter)


def batch(samples=2):
    """x_t, controls and prompts."""
    generator = torch.Generator().manual_seed(1)
    shapes = (samples, 8, 4, 6), (samples, 8, 4, 6), (samples, 16, 32), (samples, 32)
    x_t, control, text, pooled = (torch.randn(shape, generator=generator) for shape in shapes)
    return x_t, [control], {"prompt_embeds": text, "pooled_prompt_embeds": pooled}


def velocity(module, t):
    x_t, controls, prompt = batch(len(t))
    return module.velocity(x_t, torch.tensor(t), controls, prompt)


def gradients(module):
    return {name: parameter.grad.clone() for name, parameter in trainable(module.transformer).items()}


# The layer


@pytest.mark.parametrize("shape", [(3, 64), (3, 5, 64), (3, 2, 5, 64)])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_layer_equals_the_dense_closed_form_forward_and_backward(tiny, adapter, shape):
    module = build(tiny, adapter, "adapter.alpha_rank_scale=1.5")
    learn(module)
    layer = module.transformer.double().get_submodule(LAYER)
    timesteps = torch.tensor([900.0, 500.0, 0.0])
    mask = RankSchedule("timestep", RANK, 1, 1.5).mask(timesteps).double()
    assert mask.sum(dim=1).tolist() == [1, 2, 4]
    mask = mask.view(3, *[1] * (len(shape) - 2), RANK)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    base, scale = layer.get_base_layer(), 6 / RANK
    own = [x, *(parameter for half in (down, up) for parameter in half.parameters() if parameter.requires_grad)]
    if adapter == "tlora":
        dense = ((x @ down.weight.T) * mask) @ up.weight.T
    else:
        frozen = ((x @ down.initial.T) * mask) @ up.initial.T
        dense = ((x @ down.weight.T) * mask * down.singular_values) @ up.weight.T - frozen
    expected = base(x) + scale * dense
    weights = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), own)
    [gate] = module.rank_gates
    gate.open(timesteps, None, torch.float64)
    got = layer(x)
    got_gradients = torch.autograd.grad((got * weights).sum(), own)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_gradients, expected_gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_masked_components_get_exactly_zero_gradient(tiny, adapter):
    module = build(tiny, adapter)
    learn(module)
    velocity(module, [0.6, 0.9]).square().mean().backward()  # ranks 2 and 1
    for layer in lora_layers(module.transformer, ADAPTER).values():
        for parameter in layer.lora_A[ADAPTER].parameters():
            if parameter.requires_grad:
                assert (parameter.grad[:2] != 0).any()
                assert (parameter.grad[2:] == 0).all()
        up = layer.lora_B[ADAPTER].weight
        assert (up.grad[:, :2] != 0).any()
        assert (up.grad[:, 2:] == 0).all()


def test_full_mask_is_plain_lora_bitwise(tiny):
    plain = build(tiny, "lora")
    masked = build(tiny, "tlora", "adapter.init_lora_weights=true", "adapter.rank_schedule=constant")
    for module in (plain, masked):
        learn(module)
    outputs = [velocity(module, [0.3, 0.9]) for module in (plain, masked)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().mean().backward()
    one, other = gradients(plain), gradients(masked)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("more", ["adapter.svd_of=weight", "adapter.svd_of=random"])
def test_orthogonal_adapter_starts_at_exactly_zero(tiny, more, autocast):
    module = build(tiny, "ortho_tlora", more, "adapter.target_modules=all-linear")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        fresh = velocity(module, [0.1, 0.7])
        module.transformer.disable_adapters()
        assert torch.equal(fresh, velocity(module, [0.1, 0.7]))


@pytest.mark.parametrize("sig_type", ["principal", "last", "middle"])
@pytest.mark.parametrize("svd_of", ["weight", "random"])
def test_orthogonal_adapter_starts_from_singular_triples(tiny, svd_of, sig_type):
    module = build(tiny, "ortho_tlora", f"adapter.sig_type={sig_type}", f"adapter.svd_of={svd_of}",
                   "adapter.target_modules=all-linear")  # fmt: skip
    rectangular = 0
    for layer in lora_layers(module.transformer, ADAPTER).values():
        q, p = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        values = layer.lora_A[ADAPTER].singular_values
        torch.testing.assert_close(q @ q.T, torch.eye(RANK), rtol=0, atol=1e-5)
        torch.testing.assert_close(p.T @ p, torch.eye(RANK), rtol=0, atol=1e-5)
        assert (values.diff() <= 0).all()
        if svd_of == "weight":
            weight = layer.get_base_layer().weight
            torch.testing.assert_close(weight @ q.T, p * values, rtol=1e-3, atol=1e-4)
            every = torch.linalg.svdvals(weight)
            start = {"principal": 0, "last": len(every) - RANK, "middle": -((RANK - len(every)) // 2)}[sig_type]
            torch.testing.assert_close(values, every[start : start + RANK], rtol=1e-4, atol=1e-5)
        rectangular += layer.in_features != layer.out_features
    assert rectangular > 3


def test_random_singular_values_are_those_of_a_matrix_with_standard_deviation_1_over_rank(tiny):
    """Marchenko and Pastur: between |sqrt(rows) - sqrt(columns)| and sqrt(rows) + sqrt(columns) times the deviation."""
    largest = []
    for seed in range(3):
        module = build(tiny, "ortho_tlora", "adapter.sig_type=principal", f"adapter.seed={seed}")
        layer = module.transformer.get_submodule(LAYER)
        largest.append(float(layer.lora_A[ADAPTER].singular_values[0].detach()))
        assert not torch.equal(
            layer.lora_A[ADAPTER].weight,
            module.transformer.get_submodule("transformer_blocks.1.attn.to_q").lora_A[ADAPTER].weight,
        )
    assert torch.tensor(largest).mean() == pytest.approx((64**0.5 + 64**0.5) / RANK, rel=0.1)


def test_rank_above_the_singular_values_is_refused(tiny):
    with pytest.raises(UserError, match=r"adapter.rank=65: transformer_blocks.0.attn.to_\w+ has 64 singular values"):
        build(tiny, "ortho_tlora", "adapter.rank=65")


# Forwards


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_gradient_checkpointing_has_the_mask_of_its_forward_whatever_ran_in_between(tiny, adapter, autocast):
    """Another forward, at another t, between the forward and the backward: a sample picture, say."""
    plain = build(tiny, adapter, "model.gradient_checkpointing=false")
    checkpointed = build(tiny, adapter, "model.gradient_checkpointing=true")
    for module in (plain, checkpointed):
        learn(module)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = velocity(module, [0.2, 0.6]).float().square().mean()
            with torch.no_grad():
                velocity(module, [0.95, 0.05])
        loss.backward()
    one, other = gradients(plain), gradients(checkpointed)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_autocast_trains_float32_weights_close_to_float32(tiny, adapter):
    """The relative error of bf16 products, 2**-8 for each, a few of them in a row."""
    runs = []
    for enabled in (False, True):
        module = build(tiny, adapter)
        learn(module)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            velocity(module, [0.2, 0.6]).float().square().mean().backward()
        runs.append(gradients(module))
    for name, exact in runs[0].items():
        assert runs[1][name].dtype == torch.float32
        assert (runs[1][name] - exact).norm() < 0.05 * exact.norm()
        assert (runs[1][name][exact == 0] == 0).all(), "masked components"


def test_small_change_of_an_orthogonal_adapter_survives_bf16(tiny):
    """The difference of two bf16 products would have an error of 2**-9 of what cancels, here 50 times the change."""
    module = build(tiny, "ortho_tlora", "adapter.sig_type=principal", "adapter.rank_schedule=constant")
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


@pytest.mark.parametrize(
    ("adapter", "checkpointing", "whole"),
    [("tlora", False, True), ("tlora", True, False), ("ortho_tlora", False, False), ("ortho_tlora", True, True)],
)
def test_compiled_once_for_every_timestep(tiny, adapter, checkpointing, whole):
    module = build(tiny, adapter, f"model.gradient_checkpointing={checkpointing}")
    learn(module)
    times = [[0.05, 0.9], [0.2, 0.1], [0.4, 0.4], [0.6, 0.05], [0.8, 0.3], [0.99, 0.5]]
    expected = [velocity(module, t).detach() for t in times]
    torch._dynamo.reset()
    if whole:
        module.transformer.compile(backend="aot_eager", fullgraph=True)
    else:
        module.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    first = velocity(module, times[0])
    first.square().mean().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t, eager in zip(times, expected, strict=True):
            compiled = velocity(module, t)
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
            compiled.square().mean().backward()


def test_forward_without_a_mask_is_an_error(tiny):
    module = instantiate(
        compose("train", "model=flux_kontext", "model.dtype=float32", "adapter=tlora").model,
        pretrained_model_name_or_path=str(tiny),
    )
    module.configure_model()
    with pytest.raises(UserError, match="ran without a rank mask: train and predict with callbacks"):
        velocity(module, [0.5])
    mask_forwards(module.transformer, module.rank_gates, lambda: None)
    velocity(module, [0.5])
    with pytest.raises(UserError, match="ran without a rank mask"):
        module.transformer.get_submodule(LAYER)(torch.randn(1, 3, 64))


def test_dora_and_masks_refuse_each_other(stock):
    stock.transformer.add_adapter(LoraConfig(r=RANK, target_modules=["to_q"], use_dora=True))
    with pytest.raises(UserError, match="to_q is a DoRA layer"):
        RankGate(RankSchedule("timestep", RANK, 1, 1.0)).attach(stock.transformer, ADAPTER)


# The optimizer


def steps(module, optimizer, *times):
    """Take an optimizer step at each t; gives the weights and moments after each."""
    taken = []
    for t in times:
        optimizer.zero_grad()
        velocity(module, [t, t]).square().mean().backward()
        module.adapter.before_step(optimizer, module.transformer)
        optimizer.step()
        taken.append(
            {
                name: [parameter.detach().clone(), *(s.clone() for s in optimizer.state[parameter].values())]
                for name, parameter in trainable(module.transformer).items()
            }
        )
    return taken


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adam_lets_masked_components_drift_and_holds_them_on_request(tiny, adapter):
    """After a step with all components, steps with the first one alone."""
    for update_masked in (True, False):
        module = build(tiny, adapter, f"adapter.update_masked={update_masked}", "optimizer.weight_decay=0.1")
        learn(module)
        optimizer = module.configure_optimizers()["optimizer"]
        before, *_, after = steps(module, optimizer, 0.0, 0.9, 0.9)
        for name, tensors in after.items():
            for now, then in zip(tensors, before[name], strict=True):
                if now.ndim == 0:  # Adam's count of steps
                    continue
                up = "lora_B" in name
                assert not torch.equal(now[:, :1] if up else now[:1], then[:, :1] if up else then[:1])
                held = torch.equal(now[:, 1:] if up else now[1:], then[:, 1:] if up else then[1:])
                assert held is not update_masked, name


def test_holding_changes_nothing_where_every_component_works(tiny):
    runs = []
    for update_masked in (True, False):
        module = build(tiny, "tlora", f"adapter.update_masked={update_masked}", "adapter.rank_schedule=constant")
        learn(module)
        runs.append(steps(module, module.configure_optimizers()["optimizer"], 0.3, 0.8)[-1])
    assert all(torch.equal(a, b) for name in runs[0] for a, b in zip(runs[0][name], runs[1][name], strict=True))


def test_holding_passes_over_layers_without_a_gradient(run, arguments, tmp_path):
    """Nothing reads the text's part of Qwen-Image's last block."""
    settings = ["adapter=tlora", "adapter.update_masked=false", "adapter.target_modules=all-linear"]
    run("train", *arguments("qwen_image_edit", tmp_path / "run", 2, *settings))


@pytest.mark.parametrize("optimizer", [bitsandbytes.optim.AdamW8bit, torch.optim.Adafactor])
def test_holding_needs_an_optimizer_with_a_number_for_each_weight(tiny, optimizer):
    """Said before weights are read."""
    settings = compose("train", "adapter=tlora", "adapter.update_masked=false").model
    module = instantiate(settings, pretrained_model_name_or_path=str(tiny))
    module.optimizer, name = optimizer, optimizer.__name__
    with pytest.raises(UserError, match=rf"adapter\.update_masked=false needs an optimizer .* {name} does not"):
        module.preflight()


# Files


def export(module, path):
    adapter = module.adapter
    save_lora(adapter_state(module.transformer), path, adapter.alpha * adapter.width, {"adapter": adapter.metadata()})


def quantize(transformer):
    """Every attention projection in 4 bits, by bitsandbytes."""
    for name, module in list(transformer.named_modules()):
        if isinstance(module, torch.nn.Linear) and ".attn." in name:
            four = bitsandbytes.nn.Linear4bit(module.in_features, module.out_features, quant_type="nf4")
            four.load_state_dict(module.state_dict())
            transformer.set_submodule(name, four.to("cpu"))


def delta(transformer, adapter_name, x, gate, timesteps):
    """What the adapter adds in a layer."""
    layer = transformer.get_submodule(LAYER)
    gate.open(timesteps, None, torch.float32)
    return layer.lora_B[adapter_name](layer.lora_A[adapter_name](x)) * layer.scaling[adapter_name]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_file_gives_the_same_output_without_the_base_it_was_made_on(tiny, tmp_path, adapter, quantized, monkeypatch):
    module = build(tiny, adapter)
    if quantized:
        del module.transformer
        module.transformer = module.load_transformer()
        quantize(module.transformer)
        module.adapter.inject(module.transformer)
    learn(module)
    export(module, tmp_path / "pytorch_lora_weights.safetensors")
    stock = FluxKontextPipeline.from_pretrained(tiny)
    with torch.no_grad():
        for parameter in stock.transformer.get_submodule(LAYER).parameters():
            parameter.zero_()
    monkeypatch.setattr(torch.linalg, "svd", None)
    stock.load_lora_weights(tmp_path, adapter_name="a")
    attach_rank_schedule(stock, tmp_path)
    [theirs] = [hook.__self__ for hook in stock.transformer.get_submodule(LAYER).lora_A["a"]._forward_hooks.values()]
    x, timesteps = torch.randn(3, 5, 64), torch.tensor([800.0, 400.0, 0.0])
    [ours] = module.rank_gates
    with torch.no_grad():
        expected = delta(module.transformer, ADAPTER, x, ours, timesteps)
        torch.testing.assert_close(delta(stock.transformer, "a", x, theirs, timesteps), expected, rtol=1e-6, atol=1e-6)
    assert len({float(sample.norm()) for sample in expected}) == 3


def test_singular_vectors_of_a_quantized_layer_are_of_what_it_computes_with(tiny):
    from bitsandbytes.functional import dequantize_4bit

    module = build(tiny, "ortho_tlora", "adapter.svd_of=weight", "adapter.sig_type=principal")
    module.transformer = module.load_transformer()
    quantize(module.transformer)
    module.adapter.inject(module.transformer)
    layer = module.transformer.get_submodule(LAYER)
    base = layer.get_base_layer().weight
    weight = dequantize_4bit(base.data, base.quant_state).float()
    q, p = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    torch.testing.assert_close(weight @ q.T, p * layer.lora_A[ADAPTER].singular_values, rtol=1e-3, atol=1e-4)


def test_orthogonal_file_is_the_exact_lora_of_twice_the_rank_its_components_in_pairs(tiny, tmp_path):
    module = build(tiny, "ortho_tlora")
    learn(module)
    export(module, tmp_path / "x.safetensors")
    stored, alphas = read_weights(tmp_path / "x.safetensors")
    layer = module.transformer.get_submodule(LAYER)
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    a, b = stored[f"{LAYER}.lora_A.weight"], stored[f"{LAYER}.lora_B.weight"]
    assert (a.shape, b.shape) == ((2 * RANK, 64), (64, 2 * RANK))
    assert alphas[LAYER] / (2 * RANK) == 6 / RANK
    for r in range(RANK + 1):
        dense = (up.weight[:, :r] * down.singular_values[:r]) @ down.weight[:r] - up.initial[:, :r] @ down.initial[:r]
        torch.testing.assert_close(b[:, : 2 * r] @ a[: 2 * r], dense.detach(), rtol=1e-5, atol=1e-5)


def load(tiny, tmp_path, *adapters, names=("a", "b")):
    """A stock pipeline with adapters that have learned."""
    stock = FluxKontextPipeline.from_pretrained(tiny)
    stock.set_progress_bar_config(disable=True)
    for name, (adapter, *more) in zip(names, adapters, strict=False):
        module = build(tiny, adapter, *more)
        learn(module)
        export(module, tmp_path / name / "pytorch_lora_weights.safetensors")
        stock.load_lora_weights(tmp_path / name, adapter_name=name)
    return stock


def picture(pipeline, steps=2, **more):
    """Small, as latents."""
    settings = {"height": 32, "width": 32, "max_area": 1024, "max_sequence_length": 16, "output_type": "latent"}
    generator = torch.Generator().manual_seed(0)
    return pipeline(prompt="x", num_inference_steps=steps, generator=generator, **settings, **more).images


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_merging_is_refused_with_the_reason(tiny, tmp_path, adapter):
    stock = load(tiny, tmp_path, [adapter])
    attach_rank_schedule(stock, tmp_path / "a")
    before = picture(stock)
    own = build(tiny, adapter).transformer.get_submodule(LAYER)
    for fuse in (stock.fuse_lora, stock.transformer.fuse_lora, lambda: stock.fuse_lora(adapter_names=["a"]), own.merge):
        with pytest.raises(UserError, match="cannot be merged or fused: its rank follows the timestep"):
            fuse()
    assert torch.equal(picture(stock), before)


def test_merging_refuses_the_t_lora_and_no_other(tiny, tmp_path):
    stock = load(tiny, tmp_path, ["tlora"], ["lora", "adapter.target_modules=all-linear"])
    attach_rank_schedule(stock, tmp_path / "a", "a")
    stock.set_adapters(["a", "b"])
    with pytest.raises(UserError, match="cannot be merged or fused"):
        stock.fuse_lora()
    assert not any(layer.merged for layer in lora_layers(stock.transformer).values()), "all or nothing"
    stock.fuse_lora(adapter_names=["b"])
    assert all(layer.merged_adapters == ["b"] for layer in lora_layers(stock.transformer).values())


def test_fused_adapter_cannot_be_given_a_schedule(tiny, tmp_path):
    stock = load(tiny, tmp_path, ["tlora"])
    stock.fuse_lora()
    with pytest.raises(UserError, match="is fused already; a T-LoRA cannot be merged or fused"):
        attach_rank_schedule(stock, tmp_path / "a")


@pytest.mark.parametrize("kind", ["timestep", "normalised", "step_index", "constant"])
def test_each_forward_of_a_stock_pipeline_has_the_rank_of_its_step(tiny, tmp_path, kind):
    """Against the formulas, of the scheduler's timesteps; in bf16, whose own rounds them; both passes of true CFG."""
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


def test_compiled_pipeline_follows_a_schedule_that_is_attached_later(tiny, tmp_path):
    stock = load(tiny, tmp_path, ["tlora"])
    full = picture(stock)
    stock.transformer.compile_repeated_blocks(backend="eager")
    torch.testing.assert_close(picture(stock), full)
    attach_rank_schedule(stock, tmp_path / "a")
    masked = picture(stock)
    eager = load(tiny, tmp_path, ["tlora"])
    attach_rank_schedule(eager, tmp_path / "a")
    torch.testing.assert_close(masked, picture(eager))
    assert (masked - full).abs().max() > 0.01


def test_another_pipeline_on_the_same_transformer_cannot_count_steps(tiny, tmp_path):
    for kind in ("step_index", "timestep"):
        stock = load(tiny, tmp_path, ["tlora", f"adapter.rank_schedule={kind}"])
        attach_rank_schedule(stock, tmp_path / "a")
        expected = picture(stock)
        other = FluxKontextPipeline(**stock.components)
        if kind == "timestep":
            assert torch.equal(picture(other), expected)
        else:
            with pytest.raises(UserError, match="rank_schedule=step_index counts the steps of the FluxKontextPipeline"):
                picture(other)


def test_training_after_an_interrupted_sampling_has_its_own_timesteps(tiny, tmp_path):
    stock = load(tiny, tmp_path, ["tlora"])
    attach_rank_schedule(stock, tmp_path / "a")

    def interrupt(pipeline, step, *_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        picture(stock, callback_on_step_end=interrupt)
    module = build(tiny, "lora")
    module.transformer = stock.transformer
    [gate] = [hook.__self__ for hook in stock.transformer.get_submodule(LAYER).lora_A["a"]._forward_hooks.values()]
    velocity(module, [0.2, 0.9])
    assert gate.active_ranks.tolist() == [3, 1]


def test_attaching_names_what_is_wrong(tiny, tmp_path):
    plain, masked = build(tiny, "lora"), build(tiny, "tlora")
    for name, module in (("plain", plain), ("masked", masked)):
        export(module, tmp_path / name / "pytorch_lora_weights.safetensors")
    stock = FluxKontextPipeline.from_pretrained(tiny)
    with pytest.raises(UserError, match="no rank schedule: it is no T-LoRA"):
        attach_rank_schedule(stock, tmp_path / "plain")
    with pytest.raises(UserError, match=r"adapter_name: name one of the adapters that are loaded \(none\)"):
        attach_rank_schedule(stock, tmp_path / "masked")
    stock.load_lora_weights(tmp_path / "masked", adapter_name="a")
    stock.load_lora_weights(tmp_path / "plain", adapter_name="b")
    with pytest.raises(UserError, match=r"that are loaded \(a, b\)"):
        attach_rank_schedule(stock, tmp_path / "masked")
    with pytest.raises(UserError, match="adapter_name=c: loaded are a, b"):
        attach_rank_schedule(stock, tmp_path / "masked", "c")
    attach_rank_schedule(stock, tmp_path / "masked", "a")


def test_header_says_what_happens_without_the_schedule_and_damaged_ones_are_told(tiny, tmp_path):
    module = build(tiny, "ortho_tlora", "adapter.min_rank=2")
    export(module, tmp_path / "x.safetensors")
    schedule = read_adapter(tmp_path / "x.safetensors")["rank_schedule"]
    note = schedule.pop("note")
    assert schedule == {"kind": "timestep", "rank": RANK, "min_rank": 2, "alpha_rank_scale": 1.0, "width": 2}
    assert "uses the full rank at every timestep" in note
    header = {"adapter": {"rank_schedule": {"kind": "timestep", "rank": RANK}}}
    save_lora(adapter_state(module.transformer), tmp_path / "x.safetensors", 6, header)
    with pytest.raises(UserError, match=r"x\.safetensors has a rank schedule that this version of Retouch"):
        attach_rank_schedule(FluxKontextPipeline.from_pretrained(tiny), tmp_path / "x.safetensors")


def test_init_from_a_file_in_bf16_keeps_a_small_change(tiny, tmp_path):
    module = build(tiny, "ortho_tlora", "adapter.sig_type=principal")
    learn(module, spread=1e-4)
    state = {name: weight.bfloat16() for name, weight in adapter_state(module.transformer).items()}
    save_lora(state, tmp_path / "x.safetensors", 12, {"adapter": module.adapter.metadata()})
    again = build(tiny, "ortho_tlora", f"adapter.init_from={tmp_path / 'x.safetensors'}")
    for name, exact in adapter_state(module.transformer).items():
        got = adapter_state(again.transformer)[name]
        assert (got - exact).norm() < 0.004 * exact.norm(), name


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_init_from_goes_on_from_the_file(tiny, tmp_path, adapter):
    module = build(tiny, adapter)
    learn(module)
    export(module, tmp_path / "x.safetensors")
    again = build(tiny, adapter, f"adapter.init_from={tmp_path / 'x.safetensors'}", "adapter.alpha=3")
    with torch.no_grad():
        torch.testing.assert_close(velocity(again, [0.2, 0.7]), velocity(module, [0.2, 0.7]), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        up = again.transformer.get_submodule(LAYER).lora_B[ADAPTER]
        torch.testing.assert_close(up.weight, module.transformer.get_submodule(LAYER).lora_B[ADAPTER].weight)
    other = "adapter=lora" if adapter == "ortho_tlora" else "adapter=ortho_tlora"
    with pytest.raises(UserError, match="was made by adapter="):
        build(tiny, other.partition("=")[2], f"adapter.init_from={tmp_path / 'x.safetensors'}")


def test_checkpoint_of_an_orthogonal_adapter_holds_what_is_frozen_too(tiny):
    """Another machine's decomposition may differ in its last bits, or in its signs."""
    module = build(tiny, "ortho_tlora")
    names = {name.rpartition(".")[2] for name in adapter_tensors(module.transformer)}
    assert names == {"weight", "singular_values", "initial"}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_in_dtype_is_what_a_loader_makes_of_the_file(tiny, tmp_path, adapter):
    """Sample pictures of a bf16 base are predict.py's: the orthogonal factors are cast after they are combined."""
    module = build(tiny, adapter, dtype="bfloat16")
    learn(module, spread=1e-2)
    export(module, tmp_path / "pytorch_lora_weights.safetensors")
    stock = FluxKontextPipeline.from_pretrained(tiny, torch_dtype=torch.bfloat16)
    stock.load_lora_weights(tmp_path)
    attach_rank_schedule(stock, tmp_path)
    x_t, [control], prompt = batch()
    before = safetensors.torch.save(adapter_tensors(module.transformer))
    with torch.no_grad(), module.adapter.in_dtype(module.transformer, torch.bfloat16):
        arguments = (x_t.bfloat16(), torch.tensor([0.2, 0.7]), [control.bfloat16()])
        prompt = {name: tensor.bfloat16() for name, tensor in prompt.items()}
        ours = module.velocity(*arguments, prompt)
        module.transformer = stock.transformer
        assert torch.equal(ours, module.velocity(*arguments, prompt))
    module = build(tiny, adapter, dtype="bfloat16")
    learn(module, spread=1e-2)
    with module.adapter.in_dtype(module.transformer, torch.bfloat16):
        pass
    assert safetensors.torch.save(adapter_tensors(module.transformer)) == before


def test_dropout_is_a_function_of_the_sample_s_number(tiny):
    """The same again whatever was drawn before, and another for another sample."""
    module = build(tiny, "tlora", "adapter.dropout=0.5", "model.timesteps.logit_std=0", "model.vae_encode_mode=mode")
    learn(module, spread=1.0)
    x_t, controls, prompt = batch(1)
    dropped = []
    layer = module.transformer.get_submodule(LAYER)
    layer.lora_dropout[ADAPTER].register_forward_hook(lambda _, inputs, output: dropped.append((output == 0).clone()))
    losses = []
    for number in (3, 4, 3):
        latents = LatentBatch(["x"], [number], x_t, x_t, controls, prompt, prompt, None)
        losses.append(module.training_step(latents, 0).detach())
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(dropped[0], dropped[2])
    assert not torch.equal(dropped[0], dropped[1])
    assert 0.3 < dropped[0].float().mean() < 0.7
