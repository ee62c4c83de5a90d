"""Rotated int8 layers, and ComfyUI's files of them (ConvRot): the same products, with less error from outliers."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from foundation.errors import UserError
from lightning_modules.pretrained.weights import save_quantized
from lightning_modules.quantization.eight_bit import ROTATED_GROUPS, rotate
from tests.lightning_modules.pretrained.test_weights import LAYER, NAME, source, write  # noqa: F401 (a fixture)
from tests.lightning_modules.quantization.test_quantized_linear import error
from tests.support.commands import compose
from tests.support.quantized import load, quantization

ROTATED = quantization("int8_w8a8", rotation=True)


def matrix(size):
    """Return the matrix in ComfyUI's way."""
    h4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1.0]])
    h = h4
    while len(h) < size:
        h = torch.kron(h, h4)
    return h / size**0.5


@pytest.mark.parametrize("group", ROTATED_GROUPS)
def test_the_rotation_is_comfyuis_and_its_own_inverse(group):
    h = matrix(group)
    assert torch.equal(rotate(torch.eye(group), group), h)
    assert torch.equal(h @ h.T, torch.eye(group))
    torch.manual_seed(0)
    x, weight = torch.randn(70, 3 * group), torch.randn(20, 3 * group)
    wanted = (x.view(-1, group) @ h).view_as(x)
    torch.testing.assert_close(rotate(x, group), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(rotate(x, group), group), x, rtol=0, atol=1e-5)
    assert error(rotate(x, group) @ rotate(weight, group).T, x @ weight.T) < 1e-6
    assert error(rotate(x.bfloat16(), group), wanted) < 2**-8


def test_pieces_are_rotated_as_the_whole(monkeypatch):
    x = torch.randn(70, 512)
    whole = rotate(x, 256)
    monkeypatch.setattr("lightning_modules.quantization.eight_bit.PIECE", 9 * 512)
    assert torch.equal(rotate(x, 256), whole)


def layers():
    """Return a layer, the two quantized layers, and inputs of which six are 30 times the others."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3072, 96), torch.randn(40, 3072)
    x[:, 7::512] *= 30
    return layer, quantization("int8_w8a8").quantize(layer), ROTATED.quantize(layer), x


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outliers_cost_less_precision(compiled):
    """A step is 1/127 of the largest input, which is about 60 here: half the size of the others."""
    layer, plain, rotated, x = layers()
    errors = []
    for quantized in plain, rotated:
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, wanted = torch.compile(quantized)(ours) if compiled else quantized(ours), layer(theirs)
        grad = torch.randn_like(y)
        y.backward(grad)
        wanted.backward(grad)
        assert error(ours.grad, theirs.grad) < 0.02
        errors.append(error(y, wanted))
    assert 0.05 < errors[0] < 0.1
    assert errors[1] < 0.015


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_is_not_rotated_outside(dtype):
    layer, _, rotated, x = layers()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        weight = rotated.dequantize(torch.float32)
        product = rotated.exact_product(x.to(dtype))
        rotated.rounds = False
        y = rotated(x)
    half_step = rotate(layer.weight, 256).abs().amax(1, keepdim=True) / 254
    assert (rotate(weight - layer.weight, 256).abs() <= half_step * 1.001).all()
    tolerance = 1e-6 if dtype == torch.float32 else 4 * 2**-9
    assert error(product, x @ weight.T) < tolerance
    assert error(y, x @ weight.T + layer.bias) < tolerance


def test_an_input_of_both_kinds_of_layers_is_rounded_for_each():
    _, plain, rotated, x = layers()
    wanted = rotated(x.clone())
    plain(x)
    assert torch.equal(rotated(x), wanted)


def test_groups_fit_the_inputs():
    groups = {size: ROTATED.quantize(nn.Linear(size, 16)).group for size in (15360, 64, 96, 20, 18)}
    assert groups == {15360: 256, 64: 64, 96: 16, 20: 4, 18: 1}


def test_another_format_does_not_rotate(refuses):
    words = "model.quantization.rotation=true: only int8_w8a8 rotates, fp8 does not. Set it to false."
    refuses("model/quantization=fp8", "model.quantization.rotation=true", words=words)
    for format in ("fp8", "int8_w8a8"):
        assert compose("train", f"model/quantization={format}").model.quantization.rotation == (format != "fp8")


def convrot(note, group=16):
    """Return the tensors of a layer as ComfyUI writes them."""

    def replace(module):
        weight = (module.weight.float().view(len(module.weight), -1, group) @ matrix(group).T).flatten(1)
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {
            "weight": (weight / scale).round().to(torch.int8),
            "weight_scale": scale,
            "comfy_quant": torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8),
        }

    return replace


ROTATION = {"convrot": True, "convrot_groupsize": 16}
NOTE = {"format": "int8_tensorwise", **ROTATION}
NOTES = {
    "ComfyUI": NOTE,
    "a converter": {**NOTE, "per_row": True, "orig_dtype": "torch.bfloat16"},
    "nested": {"format": "int8_tensorwise", "params": ROTATION},
    "header": NOTE,
}


@pytest.mark.parametrize("kind", NOTES)
def test_comfyuis_file_is_the_original_to_half_a_step(source, tmp_path, kind):  # noqa: F811
    folder = write(source, tmp_path, convrot(NOTES[kind]))
    state = load_file(folder / NAME)
    if kind == "header":
        notes = {
            name.removesuffix(".comfy_quant"): state.pop(name) for name in [*state] if name.endswith("comfy_quant")
        }
        layers = {name: json.loads(bytes(note.tolist())) for name, note in notes.items()}
        save_file(state, folder / NAME, {"_quantization_metadata": json.dumps({"layers": layers})})
    model = load(folder)
    for name, module in source.named_modules():
        if isinstance(module, nn.Linear) and name != "proj_out":
            layer = model.get_submodule(name)
            assert layer.group == 16
            assert torch.equal(layer.weight, state[f"{name}.weight"])
            lost = rotate(layer.dequantize(torch.float32) - module.weight.float(), 16)
            assert (lost.abs() <= state[f"{name}.weight_scale"] / 2 * 1.01).all()


REFUSED = {
    "size": ({"convrot_groupsize": 32}, "rotated in groups of 32, which is not read"),
    "inputs": ({"convrot_groupsize": None}, "rotated in groups of 256, which is not read"),  # the default
    "text": ({"convrot_groupsize": "16"}, "rotated in groups of 16, which is not read"),
    "format": ({"format": "convrot_w4a4"}, "quantized by convrot_w4a4, which is not read"),
    "weights": ({"weight_rotated": False}, "quantized by int8_tensorwise, which is not read"),
    "more": ({"smooth": True}, "quantized by int8_tensorwise, which is not read"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_rotation_is_refused(source, tmp_path, kind):  # noqa: F811
    note, words = REFUSED[kind]
    write(source, tmp_path, convrot({key: value for key, value in (NOTE | note).items() if value is not None}))
    with pytest.raises(UserError, match=words) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_rotated_transformer_is_saved_and_loaded_bitwise(repositories, tmp_path, caplog):
    model = load(repositories["flux_kontext"], quantization=ROTATED)
    save_quantized(model, ROTATED, tmp_path)
    with caplog.at_level("INFO", "retouch"):
        again = load(tmp_path)
    assert "int8_w8a8: products in 8 bits" in caplog.text
    assert again.get_submodule(LAYER).group == 64
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    x = torch.randn(40, 64)
    assert torch.equal(again.get_submodule(LAYER)(x), model.get_submodule(LAYER)(x))
    with safe_open(tmp_path / NAME, "pt") as file:
        note = json.loads(bytes(file.get_tensor(f"{LAYER}.comfy_quant").tolist()))
    assert note == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
