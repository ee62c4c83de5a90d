"""Transformers that are quantized on disk: they are loaded as they are, and what they lack is named."""

import json
import shutil

import bitsandbytes
import pytest
import torch
from diffusers import FluxTransformer2DModel
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from torch import nn

from datamodules.errors import UserError
from lightning_modules.pretrained.checks import check_weight_files
from lightning_modules.pretrained.transformer import TransformerSource, transformer_weights
from lightning_modules.quantization.eight_bit import E4M3, E5M2
from lightning_modules.quantization.linear import QuantizedLinear
from tests.lightning_modules.quantization.test_quantization import FP8
from tests.support.foreign_files import flux, qwen, velocity, z_image
from tests.support.quantized import CPU, load, quantization

NAME = "diffusion_pytorch_model.safetensors"
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def source(repositories):
    """Save a tiny FLUX transformer in bf16."""
    return FluxTransformer2DModel.from_pretrained(
        repositories["flux_kontext"], subfolder="transformer", torch_dtype=torch.bfloat16
    )


def write(transformer, folder, replace, config=None, extra=None):
    """Write its folder, with the tensors (suffix -> tensor) of `replace` for each linear layer but proj_out."""
    transformer.save_pretrained(folder)
    state = load_file(folder / NAME)
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and name != "proj_out":
            del state[f"{name}.weight"]
            state |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in replace(module).items()}
    save_file(state | (extra or {}), folder / NAME)
    if config is not None:
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return folder


def by_bitsandbytes(make):
    """Return the saved tensors of a bitsandbytes layer."""

    def replace(module):
        layer = make(module)
        layer.load_state_dict(module.state_dict())
        state = layer.to("cpu").state_dict()
        return {key: tensor for key, tensor in state.items() if key != "bias"}

    return replace


def four_bit(quant_type, double):
    return by_bitsandbytes(
        lambda m: bitsandbytes.nn.Linear4bit(m.in_features, m.out_features, True, torch.bfloat16, double, quant_type)
    )


def fp8(scale_name=None, shape=(), dtype=E4M3, hints=()):
    """Return fp8 tensors with one scale per layer, as in published files, or without a scale."""

    def replace(module):
        scale = module.weight.abs().max().float() / torch.finfo(dtype).max
        if scale_name is None:
            return {"weight": module.weight.to(dtype)}
        more = {hint: torch.ones(()) for hint in hints}
        return {"weight": (module.weight.float() / scale).to(dtype), scale_name: scale.reshape(shape), **more}

    return replace


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FORMATS = {
    "bitsandbytes fp4": (four_bit("fp4", False), BNB | {"bnb_4bit_quant_type": "fp4"}, "fp4"),
    "bitsandbytes nf4, double": (four_bit("nf4", True), BNB | {"bnb_4bit_quant_type": "nf4"}, "nf4"),
    "bitsandbytes int8": (
        by_bitsandbytes(lambda m: bitsandbytes.nn.Linear8bitLt(m.in_features, m.out_features, True, False)),
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "int8",
    ),
    "fp8 scaled": (fp8("weight_scale", (1,)), None, "fp8"),
    "fp8 scaled, ComfyUI's names": (fp8("scale_weight", hints=["scale_input"]), None, "fp8"),
    "fp8 plain": (fp8(), None, "fp8"),
    "fp8 plain, e5m2": (fp8(dtype=E5M2), None, "fp8"),
}


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request, source, tmp_path_factory):
    replace, config, format = FORMATS[request.param]
    return write(source, tmp_path_factory.mktemp("checkpoint"), replace, config), format


def test_layers_are_loaded_as_they_are(checkpoint, source):
    """dtype and bytes are those on disk, not upcast; the dequantized values are close to the original."""
    folder, format = checkpoint
    state = load_file(folder / NAME)
    model = load(folder)
    assert transformer_weights(str(folder)).format == format
    assert type(model.proj_out) is nn.Linear
    for name, module in source.named_modules():
        if isinstance(module, nn.Linear) and name != "proj_out":
            layer, stored = model.get_submodule(name), state[f"{name}.weight"]
            assert isinstance(layer, QuantizedLinear)
            assert layer.parts()[0].dtype == stored.dtype
            assert torch.equal(layer.weight.data.view(torch.uint8).flatten(), stored.view(torch.uint8).flatten())
            assert torch.equal(layer.bias, module.bias)
            original = module.weight.float()
            assert (layer.dequantize(torch.float32) - original).norm() < 0.13 * original.norm()
    kept = sum(t.nbytes for k, t in model.state_dict().items() if not k.endswith("weight_scale"))
    on_disk = sum(t.nbytes for k, t in state.items() if "scale" not in k and not k.endswith("weight_format"))
    assert kept == on_disk


def test_settings_do_not_quantize_what_is_quantized(checkpoint, caplog):
    folder, format = checkpoint
    other = "fp8" if format in ("fp4", "nf4") else "nf4"
    source = TransformerSource("FluxTransformer2DModel", str(folder), None, torch.bfloat16, quantization(other), 0)
    assert source.load(CPU).get_submodule(LAYER).storage.startswith(format)
    assert source.precision == source.expected_precision == format
    assert f"is {format} on disk: model.quantization.format={other} is ignored" in caplog.text


@pytest.mark.parametrize("format", ["fp8", "fp4", "nf4", "int8"])
def test_what_task_quantize_writes_loads_bitwise(run, repositories, tmp_path, format):
    tiny = repositories["flux_kontext"]
    made = ["model=flux_kontext_fp8", f"model.quantization.format={format}", f"output_dir={tmp_path}"]
    outcome = run("predict", "task=quantize", *made, f"model.pretrained_model_name_or_path={tiny}")
    assert f"holds {format}" in outcome.text
    assert f"model.transformer_name_or_path={tmp_path}" in outcome.text
    again = load(tmp_path)
    direct = load(tiny, quantization=instantiate(FP8, format=format))
    ours, theirs = again.state_dict(), direct.state_dict()
    assert ours.keys() == theirs.keys()
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config.get("load_in_4bit", False) == (format in ("fp4", "nf4"))
    for key in (key for key in ours if key.startswith(LAYER) and "bias" not in key and "quant_state" not in key):
        assert torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8))


def damaged(folder, tmp_path, change):
    """Write a copy whose tensors `change` has modified."""
    shutil.copytree(folder, tmp_path / "damaged")
    state = load_file(folder / NAME)
    change(state)
    save_file(state, tmp_path / "damaged" / NAME)
    return tmp_path / "damaged"


LACKS = {
    "fp8 scaled": (lambda s: s.pop(f"{LAYER}.weight_scale"), f"lacks the scales of {LAYER}: the file is incomplete"),
    "bitsandbytes fp4": (
        lambda s: s.pop(f"{LAYER}.weight.quant_state.bitsandbytes__fp4"),
        f"lacks the scales of {LAYER}: the file is incomplete",
    ),
    "bitsandbytes int8": (lambda s: s.pop(f"{LAYER}.SCB"), f"lacks the scales of {LAYER}"),
    "bitsandbytes nf4, double": (lambda s: s.pop(f"{LAYER}.weight.absmax"), f"the quant state of {LAYER} is damaged"),
    "fp8 plain": (lambda s: s.pop(f"{LAYER}.weight"), f"lacks {LAYER}.weight: is it complete, and made for Flux"),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_a_checkpoint_lacks_is_named_in_one_line(source, tmp_path, name):
    replace, config, _ = FORMATS[name]
    change, message = LACKS[name]
    folder = damaged(write(source, tmp_path / "whole", replace, config), tmp_path, change)
    with pytest.raises(UserError) as raised:
        load(folder)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_marker_of_scales_without_any_is_an_error(source, tmp_path):
    folder = write(source, tmp_path, fp8(), extra={"scaled_fp8": torch.zeros(2, dtype=E4M3)})
    with pytest.raises(UserError, match="lacks the scales of "):
        load(folder)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            lambda module: fp8()(module) | {"weight_scale": torch.ones(2, 2)},
            r"scales \(2, 2\) in torch.float32 on disk: expected one",
        ),
        (
            lambda module: fp8()(module) | {"weight_scale": torch.ones(len(module.weight), 1, dtype=torch.uint8)},
            "torch.uint8",
        ),
    ],
)
def test_scales_that_are_not_known_are_named(source, tmp_path, scales, message):
    with pytest.raises(UserError, match=message):
        load(write(source, tmp_path, scales))


def test_layers_of_another_shape_are_named(source, tmp_path):
    def shrink(state):
        state[f"{LAYER}.weight"] = state[f"{LAYER}.weight"][:32].contiguous()

    folder = damaged(write(source, tmp_path / "whole", fp8()), tmp_path, shrink)
    with pytest.raises(UserError, match=f"{LAYER} is 32x64 on disk, 64x64 in the model"):
        load(folder)


def test_a_shard_that_is_missing_or_damaged_is_named(source, tmp_path):
    source.save_pretrained(tmp_path, max_shard_size="300KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[:1000])
    with pytest.raises(UserError, match=r"00002.*is damaged \(.*\); download it again"):
        load(tmp_path)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"lacks {shards[1].name}"):
        load(tmp_path)


def test_sharded_weights_are_read_from_all_files(source, tmp_path):
    source.save_pretrained(tmp_path, max_shard_size="300KB")
    model = load(tmp_path, quantization=quantization("int8"))
    assert all(not parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.x_embedder.bias, source.x_embedder.bias)


def int8(shape=(), note=None):
    """Return int8 tensors with a scale per layer or row, as in ComfyUI's int8_tensorwise."""

    def replace(module):
        weight = module.weight.float()
        largest = weight.abs().max() if shape == () else weight.abs().amax(1, keepdim=True)
        scale = largest / 127
        said = json.dumps({"format": "int8_tensorwise"} | (note or {})).encode()
        return {
            "weight": (weight / scale).round().to(torch.int8),
            "weight_scale": scale.reshape(shape) if shape == () else scale,
            "comfy_quant": torch.tensor(list(said), dtype=torch.uint8),
        }

    return replace


@pytest.mark.parametrize("shape", [(), "rows"], ids=["a layer", "a row"])
def test_int8_with_scales_is_the_integer_times_its_scale(source, tmp_path, shape):
    folder = write(source, tmp_path / "int8", int8(shape))
    state = load_file(folder / NAME)
    layer = load(folder).get_submodule(LAYER)
    meant = state[f"{LAYER}.weight"].float() * state[f"{LAYER}.weight_scale"]
    original = source.get_submodule(LAYER).weight.float()
    torch.testing.assert_close(layer.dequantize(torch.float32), meant, rtol=2**-8, atol=0)  # in bfloat16
    assert (meant - original).abs().max() <= 0.51 * float(state[f"{LAYER}.weight_scale"].max())


UNREAD = {
    "ConvRot": (int8(note={"convrot": True}), {}, "quantized in an unknown way (format int8_tensorwise, convrot True)"),
    "integers without a scale": (
        lambda module: {"weight": module.weight.to(torch.int8)},
        {},
        "lacks the scales of",
    ),
    "nvfp4": (
        fp8("weight_scale"),
        {f"{LAYER}.weight_scale_2": torch.ones(())},
        "weight_scale_2, for which its model has no place",
    ),
    "blocks": (fp8("weight_scale_inv"), {}, "weight_scale_inv"),
    "nunchaku": (lambda module: {"weight": module.weight}, {f"{LAYER}.wscales": torch.ones(2)}, "wscales, for which"),
    "GPTQ": (lambda module: {"weight": module.weight}, {f"{LAYER}.qzeros": torch.ones(2)}, "qzeros, for which"),
    "a LoRA beside": (
        lambda module: {"weight": module.weight},
        {f"{LAYER}.lora_A.weight": torch.ones(2, 64)},
        "lora_A.weight, for which",
    ),
    "no place": (
        lambda module: {"weight": module.weight},
        {"extra.weight": torch.ones(2)},
        "has extra.weight, for which",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_quantized_file_is_read_whole_or_refused_by_name(source, tmp_path, name):
    replace, extra, words = UNREAD[name]
    folder = write(source, tmp_path / "file", replace, extra=extra)
    with pytest.raises(UserError) as raised:
        load(folder, quantization=quantization("nf4"))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["kontext.safetensors", "models/kontext.gguf", "./kontext", "~/kontext.ckpt"])
def test_a_single_file_is_said_to_be_one_and_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    from lightning_modules.pretrained.repository import resolve_repository

    monkeypatch.chdir(tmp_path)
    for there in (False, True):
        if there and not name.startswith("~"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"GGUF" + bytes(60) if name.endswith("gguf") else b"\x02" + bytes(60))
        with pytest.raises(
            UserError, match="Name a folder in diffusers' layout, or such a repository on the hub"
        ) as raised:
            resolve_repository(name)
        assert "network" not in str(raised.value)
        assert ("is a GGUF file" in str(raised.value)) == (there and name.endswith("gguf"))


@pytest.mark.parametrize(
    ("names", "class_name", "message"),
    [
        (
            ["diffusion_pytorch_model.fp16.safetensors"],
            "FluxTransformer2DModel",
            r"has .* and not .*: rename a variant of it",
        ),
        (
            ["flax_model.msgpack", "model.onnx"],
            "CLIPTextModel",
            r"has flax_model.*, model.onnx and not model.safetensors",
        ),
    ],
)
def test_weights_of_another_variant_are_named(tmp_path, names, class_name, message):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        check_weight_files(tmp_path, class_name)


@pytest.mark.parametrize("build", [flux, qwen, z_image])
def test_fp8_in_every_layer_computes_as_its_numbers_do(build, tmp_path):
    """This includes the embedders, whose weights' dtype diffusers queries."""
    plain = build()
    plain.save_pretrained(tmp_path)
    state = load_file(tmp_path / NAME)
    layers = [f"{name}.weight" for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    save_file(state | {name: state[name].to(E4M3) for name in layers}, tmp_path / NAME)
    plain.load_state_dict(state | {name: state[name].to(E4M3).float() for name in layers})
    model = load(tmp_path, type(plain).__name__, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(velocity(model), velocity(plain), rtol=1e-4, atol=1e-4)
