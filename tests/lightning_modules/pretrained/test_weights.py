"""Transformers that are quantized on disk: they are loaded as they are, and what they lack is named."""

import json

import bitsandbytes
import pytest
import torch
from diffusers import FluxTransformer2DModel
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from torch import nn

from foundation.errors import UserError
from lightning_modules.pretrained.checks import open_weights
from lightning_modules.pretrained.repository import resolve_repository
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.pretrained.weights import save_quantized
from lightning_modules.quantization.eight_bit import E4M3
from lightning_modules.quantization.linear import QuantizedLinear
from tests.lightning_modules.quantization.test_quantization import FP8
from tests.support.foreign_files import flux, velocity, z_image
from tests.support.quantized import CPU, NAMES, load, quantization

NAME = "diffusion_pytorch_model.safetensors"
LAYER = "transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def source(repositories):
    """Save a tiny FLUX transformer in bf16."""
    return FluxTransformer2DModel.from_pretrained(
        repositories["flux_kontext"], subfolder="transformer", torch_dtype=torch.bfloat16
    )


def write(transformer, folder, replace, config=None):
    """Write its folder, with the tensors (suffix -> tensor) of `replace` for each linear layer but proj_out."""
    transformer.save_pretrained(folder)
    state = load_file(folder / NAME)
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and name != "proj_out":
            del state[f"{name}.weight"]
            state |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in replace(module).items()}
    save_file(state, folder / NAME)
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


eight_bit = by_bitsandbytes(lambda m: bitsandbytes.nn.Linear8bitLt(m.in_features, m.out_features, True, False))
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FORMATS = {
    "bitsandbytes fp4": (four_bit("fp4", False), BNB | {"bnb_4bit_quant_type": "fp4"}, "fp4"),
    "bitsandbytes nf4, double": (four_bit("nf4", True), BNB | {"bnb_4bit_quant_type": "nf4"}, "nf4"),
    "bitsandbytes int8": (eight_bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8_w8a8"),
    "fp8 scaled": (fp8("weight_scale", (1,)), None, "fp8"),
    "fp8 scaled, ComfyUI's names": (fp8("scale_weight", hints=["scale_input"]), None, "fp8"),
    "fp8 plain": (fp8(), None, "fp8"),
    "fp8 plain, e5m2": (fp8(dtype=torch.float8_e5m2), None, "fp8"),
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
    source_on_disk = TransformerSource("FluxTransformer2DModel", str(folder), None, torch.bfloat16, None, 0)
    assert source_on_disk.stored_format == format
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


def test_settings_do_not_quantize_what_is_quantized(source, tmp_path, caplog):
    folder = write(source, tmp_path / "fp8", fp8())
    int8 = TransformerSource("FluxTransformer2DModel", str(folder), None, torch.bfloat16, quantization("int8_w8a8"), 0)
    assert int8.load(CPU).get_submodule(LAYER).storage.startswith("fp8")
    assert int8.precision == int8.expected_precision == "fp8"
    assert "is fp8 on disk: model.quantization.format=int8_w8a8 is ignored" in caplog.text


@pytest.mark.parametrize("format", NAMES)
def test_a_quantized_transformer_is_saved_and_loaded_bitwise(repositories, tmp_path, format):
    how = instantiate(FP8, format=format)
    model = load(repositories["flux_kontext"], quantization=how)
    save_quantized(model, how, tmp_path)
    ours, theirs = load(tmp_path).state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config.get("load_in_4bit", False) == (format in ("fp4", "nf4"))
    for key in (key for key in ours if key.startswith(LAYER) and "bias" not in key and "quant_state" not in key):
        assert torch.equal(ours[key].view(torch.uint8), theirs[key].view(torch.uint8))


def test_a_shard_that_is_missing_or_damaged_is_named(source, tmp_path):
    shards_of(source, tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(map(torch.equal, load(tmp_path).parameters(), source.parameters()))
    shards[1].write_bytes(shards[1].read_bytes()[:1000])
    with pytest.raises(UserError, match=r"00002.*is damaged \(.*\); download it again"):
        load(tmp_path)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"lacks {shards[1].name}"):
        load(tmp_path)


def shards_of(source, folder):
    """Write a transformer in shards; return the first two, and the index."""
    source.save_pretrained(folder, max_shard_size="300KB")
    return *sorted(folder.glob("*.safetensors"))[:2], folder / f"{NAME}.index.json"


def twice(first, second, index):
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)
    return rf"00001-of.* and .*00002-of-\S+ both contain {name}: download"


def elsewhere(first, second, index):
    content = json.loads(index.read_text())
    name = min(name for name, file in content["weight_map"].items() if file == first.name)
    content["weight_map"][name] = second.name
    index.write_text(json.dumps(content))
    return rf"index.json says that {name} is in \S+00002-of\S+, and it is in \S+00001-of\S+: download"


def unlisted(first, second, index):
    content = json.loads(index.read_text())
    name = min(content["weight_map"])
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    return rf"says that {name} is in no file, and it is in"


def nowhere(first, second, index):
    name, *kept = load_file(first)
    save_file({key: load_file(first)[key] for key in kept}, first)
    return rf"says that {name} is in \S+00001-of\S+, and it is in no file"


def also_whole(first, second, index):
    save_file(load_file(first), first.with_name(NAME))
    return rf"00001-of\S+ and \S+{NAME} both contain"


@pytest.mark.parametrize("change", [twice, elsewhere, unlisted, nowhere, also_whole], ids=lambda one: one.__name__)
def test_an_index_and_shards_that_contradict_each_other_are_refused(source, tmp_path, change):
    words = change(*shards_of(source, tmp_path))
    with pytest.raises(UserError, match=words):
        load(tmp_path)


def test_shards_without_an_index_are_refused(source, tmp_path):
    shards_of(source, tmp_path)[2].unlink()
    with pytest.raises(UserError, match=rf"00001-of\S+ .* and not their index, {NAME}.index.json: download it again"):
        load(tmp_path)


# How the layers are stored, tensors that are replaced (None: removed), and the words of the error.
REFUSED = {
    "no scale": (fp8("weight_scale", (1,)), {"weight_scale": None}, f"lacks the scales of {LAYER}: the file is inc"),
    "no state": (four_bit("fp4", False), {"weight.quant_state.bitsandbytes__fp4": None}, "lacks the scales of"),
    "damaged state": (four_bit("nf4", True), {"weight.absmax": None}, f"the quant state of {LAYER} is damaged"),
    "no weight": (fp8(), {"weight": None}, f"lacks {LAYER}.weight: is it complete, and made for Flux"),
    "scales of blocks": (fp8("weight_scale"), {"weight_scale": torch.ones(2, 2)}, "scales (2, 2) in torch.float32 on"),
    "another shape": (fp8(), {"weight": torch.zeros(32, 64, dtype=E4M3)}, f"{LAYER}.weight of 32x64, FluxTransformer"),
    "nvfp4": (fp8("weight_scale"), {"weight_scale_2": torch.ones(())}, "is quantized to nvfp4, which is not read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_read_whole_or_refused_by_name(source, tmp_path, name):
    replace, changes, words = REFUSED[name]
    write(source, tmp_path, replace)
    state = load_file(tmp_path / NAME)
    for part, tensor in changes.items():
        key = f"{LAYER}.{part}"
        state.pop(key, None)
        state |= {} if tensor is None else {key: tensor}
    save_file(state, tmp_path / NAME)
    with pytest.raises(UserError) as raised:
        load(tmp_path)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_single_file_is_named_by_its_kind_and_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(UserError, match=r"is not there\. Name a folder in diffusers' layout or such a repository on"):
        resolve_repository("models/kontext.gguf")
    (tmp_path / "kontext.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UserError, match=r"is a GGUF file, not a repository\. .* by model.transformer_name_or_path"):
        resolve_repository(str(tmp_path / "kontext.gguf"))


@pytest.mark.parametrize(
    ("names", "library", "message"),
    [
        (["diffusion_pytorch_model.fp16.safetensors"], "diffusers", "has .* and not .*: rename a variant"),
        (["flax_model.msgpack", "model.onnx"], "transformers", "has flax_model.*, model.onnx and not model.safetens"),
        (["pytorch_model.bin"], "transformers", "has pytorch_model.bin and not .*save the model as safetensors with"),
        ([], "diffusers", "lacks its weights, .*: download it again, or save the model as safetensors"),
    ],
)
def test_weights_of_another_kind_are_named(tmp_path, names, library, message):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        open_weights(str(tmp_path), None, library)


@pytest.mark.parametrize("build", [flux, z_image])
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
