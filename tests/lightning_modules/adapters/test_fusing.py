"""Updates in a transformer's weights, plain and quantized, and updates of two transformers' difference."""

import shutil

import pytest
import safetensors.torch
import torch
from diffusers import FluxTransformer2DModel
from hydra.utils import instantiate
from torch import nn

from foundation.errors import UserError
from lightning_modules.adapters.fusing import extract, fuse_to_file, write_fused
from lightning_modules.lora_files.delta import LowRank
from tests.support.combinations import first
from tests.support.commands import compose, run_task
from tests.support.lora_files import random_delta

CPU = torch.device("cpu")
LAYERS = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp", "norm_out.linear")


def source_of(folder, *more, dtype="float32"):
    settings = [f"model.dtype={dtype}", f"model.transformer_name_or_path={folder}", *more]
    model = compose("predict", "model=flux_kontext", *settings).model
    return instantiate(model, pretrained_model_name_or_path=str(folder)).base.source


def quantized(format):
    return [f"model/quantization={format}", f"model.quantization.rotation={str(format == 'int8_w8a8').lower()}"]


def updates_of(transformer, dora=False):
    layers = [transformer.get_submodule(name) for name in LAYERS]
    return {name: random_delta(layers[seed], 3, seed, dora, 0.3) for seed, name in enumerate(LAYERS)}


def expected_weight(weight, update):
    dense = weight.double() + update.up.double() @ update.down.double()
    if update.magnitude is None:
        return dense
    return dense * (update.magnitude.double() / dense.norm(dim=1))[:, None]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_weights_are_the_dense_sums_rounded_once(tiny, tmp_path, dtype, dora):
    stored = tmp_path / "base"
    shutil.copytree(tiny / "transformer", stored)
    [file] = stored.glob("*.safetensors")
    state = {name: one.to(getattr(torch, dtype)) for name, one in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(state, file, {"format": "pt"})
    source = source_of(tiny, f"model.transformer_name_or_path={stored}", dtype=dtype)
    updates = updates_of(source.meta, dora=dora)
    rounding = write_fused(source, updates, tmp_path / "fused", CPU)
    fused = FluxTransformer2DModel.from_pretrained(tmp_path / "fused", torch_dtype=getattr(torch, dtype))
    assert "path" not in (tmp_path / "fused" / "config.json").read_text()
    lost = whole = 0.0
    for name, weight in fused.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in updates and name.endswith(".weight"):
            wanted = expected_weight(state[name], updates[layer])
            torch.testing.assert_close(
                weight, wanted.to(weight.dtype), rtol=1e-6 if dtype == "float32" else 0.01, atol=1e-6
            )
            lost += float((weight.double() - wanted).square().sum())
            whole += float((wanted - state[name].double()).square().sum())
        else:
            assert torch.equal(weight, state[name]), name
    assert rounding.share == pytest.approx((lost / whole) ** 0.5, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("format", ["fp8", "nf4"])
def test_on_a_base_that_is_to_be_quantized_the_sum_is_quantized(tiny, tmp_path, format):
    source = source_of(tiny, *quantized(format), dtype="bfloat16")
    updates = {name: one for name, one in updates_of(source.meta).items() if "norm" not in name}
    assert write_fused(source, updates, tmp_path / "fused", CPU) is None
    fused = source_of(tiny, f"model.transformer_name_or_path={tmp_path / 'fused'}", dtype="bfloat16")
    assert fused.stored_format == format
    loaded, weights = fused.load(CPU), source.weights()
    for name, update in updates.items():
        dense = expected_weight(weights.read(f"{name}.weight"), update)
        linear = nn.Linear(*reversed(dense.shape), bias=False, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(dense.bfloat16(), requires_grad=False)
        alone = source.quantization.quantize(linear)
        got = loaded.get_submodule(name).dequantize(torch.float32)
        assert relative(got, alone.dequantize(torch.float32)) < 0.01, name


def relative(one, other):
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize(("format", "most"), first(1, [("nf4", 0.15), ("fp8", 0.04), ("int8_w8a8", 0.01)]))
def test_a_base_that_is_quantized_on_disk_is_dequantized_added_to_and_quantized_unless_written_to_one_file(
    tiny, tmp_path, format, most
):
    settings = ["model=flux_kontext", f"model.pretrained_model_name_or_path={tiny}", *quantized(format)]
    run_task("quantize", *settings, f"output_dir={tmp_path / 'base'}")
    source = source_of(tiny, f"model.transformer_name_or_path={tmp_path / 'base'}", dtype="bfloat16")
    before = source.load(CPU)
    updates = updates_of(source.meta)
    rounding = write_fused(source, updates, tmp_path / "fused", CPU)
    after = source_of(tiny, f"model.transformer_name_or_path={tmp_path / 'fused'}", dtype="bfloat16")
    assert after.stored_format == format
    loaded = after.load(CPU)
    fuse_to_file(source, updates, tmp_path / "file.safetensors", CPU)
    file = source_of(tiny, f"model.transformer_name_or_path={tmp_path / 'file.safetensors'}").weights()
    assert set(file.dtypes.values()) == {"BF16"}
    lost = whole = 0.0
    for name, module in before.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        old, new = (
            one.dequantize(torch.float32) if hasattr(one, "dequantize") else one.weight.float()
            for one in (module, loaded.get_submodule(name))
        )
        unquantized = file.read(f"{name}.weight")
        assert getattr(loaded.get_submodule(name), "group", 1) == getattr(module, "group", 1)
        if name not in updates:
            assert torch.equal(old, new), name
            assert torch.equal(old.bfloat16(), unquantized), name
            continue
        dense = expected_weight(old, updates[name])
        assert relative(unquantized, dense) < 0.003, name
        assert relative(new, dense) < most, name
        lost += float((new.double() - dense).square().sum())
        whole += float((dense - old.double()).square().sum())
    assert rounding.share == pytest.approx((lost / whole) ** 0.5, rel=0.05)
    with pytest.raises(UserError, match=rf"extract= needs unquantized weights; .* is {format} on disk"):
        extract(source_of(tiny), str(tmp_path / "base"), 4, CPU)


def test_rows_without_numbers_stay_and_those_beyond_the_dtype_are_refused(tiny, tmp_path):
    source = source_of(tiny)
    [file] = (tiny / "transformer").glob("*.safetensors")
    weight = safetensors.torch.load_file(file)[f"{LAYERS[0]}.weight"]
    updates = {LAYERS[0]: LowRank(torch.eye(64), -weight, torch.ones(64))}
    write_fused(source, updates, tmp_path / "fused", CPU)
    [fused] = (tmp_path / "fused").glob("*.safetensors")
    assert safetensors.torch.load_file(fused)[f"{LAYERS[0]}.weight"].abs().max() < 1
    updates = {LAYERS[0]: LowRank(torch.full((1, 64), 1e30), torch.full((64, 1), 1e30))}
    with pytest.raises(UserError, match="exceed the range of float32"):
        write_fused(source, updates, tmp_path / "other", CPU)


def test_extracting_notes_changes_outside_a_lora_and_the_error_of_a_rank(tiny, tmp_path):
    tuned = tmp_path / "tuned"
    shutil.copytree(tiny / "transformer", tuned)
    [file] = tuned.glob("*.safetensors")
    state = safetensors.torch.load_file(file)
    layer, bias = f"{LAYERS[0]}.weight", f"{LAYERS[1]}.bias"
    difference = torch.randn(state[layer].shape, generator=torch.Generator().manual_seed(1))
    state[layer] = state[layer] + difference
    state[bias] = state[bias] + 1
    safetensors.torch.save_file(state, file, {"format": "pt"})
    deltas, error, others = extract(source_of(tiny), str(tuned), 4, CPU)
    assert list(deltas) == [LAYERS[0]]
    assert others == [bias]
    s = torch.linalg.svdvals(difference.double())
    assert error == pytest.approx(float(s[4:].norm() / s.norm()), rel=1e-4)


def test_transformers_that_cannot_be_compared_are_refused(tiny, repositories, tmp_path):
    source = source_of(tiny)
    with pytest.raises(UserError, match=r"does not differ from .* in any linear layer"):
        extract(source, str(tiny), 4, CPU)
    with pytest.raises(UserError, match=r"lacks .*: is it complete, and made for FluxTransformer2DModel\?"):
        extract(source, str(repositories["qwen_image_edit"]), 4, CPU)
    FluxTransformer2DModel.from_config(source.meta.config | {"num_layers": 1}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is not a version of .*: only one of them has transformer_blocks.1"):
        extract(source, str(tmp_path), 4, CPU)
