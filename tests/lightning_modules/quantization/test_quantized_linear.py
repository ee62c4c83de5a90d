"""Quantized layers against their dequantized weights in float32, and these against the original weights."""

import weakref

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_modules.execution.checkpointing import POLICIES, recomputed
from lightning_modules.quantization import eight_bit
from lightning_modules.quantization import linear as linear_layers
from lightning_modules.quantization.eight_bit import E4M3
from tests.support.combinations import first
from tests.support.quantized import NAMES, quantization


def linear(dtype=torch.float32, sides=(96, 128)):
    torch.manual_seed(0)
    layer = nn.Linear(sides[1], sides[0]).requires_grad_(False)
    layer.weight.mul_(torch.logspace(-2, 2, sides[0])[:, None])  # rows of different sizes
    return layer.to(dtype)


def error(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def forward_and_backward(layer, dtype, tokens=5):
    torch.manual_seed(1)
    x = torch.randn(3, tokens, 128).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = layer(x)
    grad = torch.randn(y.shape)
    y.backward(grad.to(y.dtype))
    return x.detach(), y.detach(), grad, x.grad


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_dequantized_weight(format, dtype):
    """They agree up to float32 rounding; autocast rounds input, weight and output to bf16, by at most 2^-9 each.

    int8 multiplies as few rows as these without rounding them, like modulation.
    """
    layer = quantization(format).quantize(linear(dtype))
    x, y, grad, x_grad = forward_and_backward(layer, dtype)
    weight = layer.dequantize(torch.float32)
    tolerance = 1e-6 if dtype == torch.float32 else 3 * 2**-9
    assert y.dtype == dtype
    assert error(y, x @ weight.T + layer.bias.float()) < tolerance
    assert error(x_grad, grad @ weight) < tolerance
    assert error(layer.exact_product(x[0].to(dtype)), x[0] @ weight.T) < tolerance


# Half a step: of e4m3's 3 bits relative to the weight, else to the largest weight of a row or of a block of 64.
@pytest.mark.parametrize("format", NAMES)
def test_weights_are_within_half_a_step(format):
    source = linear()
    layer = quantization(format).quantize(source)
    weight, back = linear().weight, layer.dequantize(torch.float32)
    row = weight.abs().amax(1, keepdim=True)
    block = weight.reshape(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).reshape(weight.shape)
    half_step = {
        # Below 2^-6 of e4m3's range, whose largest is 448, steps no longer shrink; a power of two may double the scale.
        "fp8": torch.maximum(weight.abs() * 2**-4, 2 * row / 448 * 2**-10),
        "int8_w8a8": row / 254 + weight.abs() * 2**-11 + 2**-25,  # bitsandbytes rounds to float16 first
        "nf4": block * 0.153,  # the widest gap of its 16 numbers, -1 to -0.6962, is 0.3038
        "fp4": block * 0.168,  # 2/3 to 1
    }[format]
    assert ((weight - back).abs() <= half_step * 1.01).all()
    assert not torch.equal(weight, back)


def test_fp8_scales_are_powers_of_two_and_bf16_dequantizes_exactly():
    layer = quantization("fp8").quantize(linear())
    weight, scale = layer.parts()
    assert torch.equal(scale.log2(), scale.log2().round())
    exact = weight.double() * scale.double()
    assert torch.equal(layer.dequantize(torch.bfloat16).double(), exact)


def test_a_gpu_without_one_of_the_kernels_multiplies_without_tensor_cores(monkeypatch):
    """Tensors have no content, and a stand-in for the product fails as on such a GPU."""

    def scaled_mm(a, b, use_fast_accum, **_):
        if not use_fast_accum:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    eight_bit._probe.cache_clear()
    with FakeTensorMode():
        assert not eight_bit.has_tensor_cores(torch.device("cuda"))
    eight_bit._probe.cache_clear()


def test_tensor_cores_add_the_rounding_of_activations_and_gradients(tensor_cores, monkeypatch):
    """An e4m3 number is off by 2^-4 at most, by less than 2^-4 / sqrt(3) in the mean square.

    PyTorch's own _scaled_mm runs on a CPU too.
    """
    calls, scaled_mm = [], torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *args, **kw: calls.append(kw["use_fast_accum"]) or scaled_mm(*args, **kw)
    )
    layer = quantization("fp8").quantize(linear())
    x, y, grad, x_grad = forward_and_backward(layer, torch.float32)
    weight = layer.dequantize(torch.float32)
    assert calls == [True, False]  # gradients are summed in float32
    assert 1e-3 < error(y, x @ weight.T + layer.bias) < 2**-4 / 3**0.5
    assert error(layer.exact_product(x), x @ weight.T) < 1e-6
    assert 1e-3 < error(x_grad, grad @ weight) < 2**-4 / 3**0.5


@pytest.fixture
def tensor_cores(monkeypatch):
    monkeypatch.setattr(eight_bit, "has_tensor_cores", torch.compiler.assume_constant_result(lambda *_: True))


def test_tensor_cores_are_not_used_if_sides_do_not_fit(tensor_cores, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", None)
    layer = quantization("fp8").quantize(linear(sides=(96, 72)))
    x = torch.randn(2, 72)
    assert error(layer(x), x @ layer.dequantize(torch.float32).T + layer.bias) < 1e-6


def rounded(x):
    """Return int8 rows and their scales in float64."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().double(), scale.double()


def test_int8_products_are_those_of_rounded_inputs_and_gradients_or_of_exact_ones():
    layer = quantization("int8_w8a8").quantize(linear())
    x, y, grad, x_grad = forward_and_backward(layer, torch.float32, tokens=8)
    weight, maxima = layer.parts()
    weight, scale = weight.double(), maxima[:, None] / 127
    rows, row_scale = rounded(x)
    assert error(y, rows * row_scale @ (weight * scale.double()).T + layer.bias.double()) < 1e-6
    rows, row_scale = rounded(grad * scale.T)
    assert error(x_grad, rows @ weight * row_scale) < 1e-6
    layer.rounds, weight = False, layer.dequantize(torch.float32)
    _, y, _, x_grad = forward_and_backward(layer, torch.float32, tokens=8)
    assert error(y, x @ weight.T + layer.bias) < 1e-6
    assert error(x_grad, grad @ weight) < 1e-6


def test_layers_with_one_input_round_it_once(monkeypatch):
    q, k = (quantization("int8_w8a8").quantize(linear()) for _ in range(2))
    rounds, round_rows = [], eight_bit._round_rows
    monkeypatch.setattr(eight_bit, "_round_rows", lambda x, *args: rounds.append(x) or round_rows(x, *args))
    x = torch.randn(32, 128)
    first = q(x)
    assert torch.equal(k(x), first)
    assert len(rounds) == 1
    x.mul_(2)
    assert not torch.equal(k(x), first)
    assert len(rounds) == 2
    del x
    k(torch.ones(32, 128))  # usually in the memory that was freed
    assert len(rounds) == 3
    assert eight_bit.round_rows(torch.randn(1, 128, 32).transpose(1, 2), torch.int8)[0].is_contiguous()  # for Triton
    with torch.inference_mode():
        x = torch.randn(32, 128)
        assert not torch.equal(q(x), q(x.mul_(2)))


def test_rounded_inputs_do_not_outlive_the_input():
    """Keep one while q, k and v read it, without a byte on the GPU after a step."""
    q = quantization("int8_w8a8").quantize(linear())
    x = torch.randn(32, 128)
    q(x)
    rows = weakref.ref(eight_bit.round_rows(x, torch.int8)[0])
    q(torch.randn(32, 128))
    assert rows() is None
    rows = weakref.ref(eight_bit.round_rows(x, torch.int8)[0])
    assert rows() is not None
    del x
    assert rows() is None


def boxed(graph, inputs):
    return make_boxed_func(graph)


class Half(nn.Module):
    """A norm and quantized layers of different sides, of which two read one input."""

    def __init__(self, *layers):
        super().__init__()
        self.norm, (self.q, self.k, self.up) = nn.LayerNorm(128), layers

    def forward(self, x):
        x = self.norm(x)
        return self.up(self.q(x) * self.k(x)).relu()


def partition(graph, inputs, static_lifetime_input_indices=None, **more):
    """Split a graph as Inductor does."""
    joint_graph_passes(graph)
    return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **more)


INDUCTOR = {"partition_fn": partition, "decompositions": select_decomp_table()}


@pytest.mark.parametrize(
    ("format", "policy"),
    first(
        2, [*(("fp8", one) for one in POLICIES), *((one, "none") for one in (*NAMES[1:], "rotated", "weights only"))]
    ),
)
def test_compiled_layers_are_one_graph_that_keeps_no_other_weight(monkeypatch, format, policy):
    """Inductor would keep a dequantized or a transposed weight for the backward pass.

    Products in 8 bits are PyTorch's own, so that kernels before and after them can be fused.
    """
    monkeypatch.setattr(eight_bit, "has_tensor_cores", torch.compiler.assume_constant_result(lambda _: format == "fp8"))
    name = {"weights only": "fp8", "rotated": "int8_w8a8"}.get(format, format)
    quantize = quantization(name, rotation=format == "rotated").quantize
    half = Half(*(quantize(linear(sides=(side, 128))) for side in (128, 128, 320)))
    block = half if policy == "none" else recomputed(half, policy, compiled=True)
    backend = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, **INDUCTOR)
    torch._dynamo.reset()
    kept, found = [], []
    for run in (half, torch.compile(lambda x: block(x), fullgraph=True, backend=backend)):
        torch.manual_seed(1)
        x = torch.randn(32, 128).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
        with hooks:
            y = run(x)
        y.backward(torch.randn(y.shape))
        found.append((y.detach(), x.grad))
        weights = [tensor.data_ptr() for layer in (half.q, half.k, half.up) for tensor in layer.parts()]
        parameters = {*weights, *(one.data_ptr() for one in half.parameters())}
        assert {one.data_ptr() for one in kept} >= {*weights}
        assert all(len(one) == 32 for one in kept if one.data_ptr() not in parameters)
        kept.clear()
    for one, other in zip(*found, strict=True):
        assert error(other, one) < 1e-3


@pytest.mark.parametrize("format", ["fp8", "int8_w8a8"])
def test_nonfinite_values_stay_so_and_rows_of_zeros_stay_zero(tensor_cores, format):
    """A diverging step is skipped then, as on other bases."""
    x = torch.randn(32, 128)
    x[0, 3], x[1, 3], x[2] = float("inf"), float("nan"), 0
    layer = quantization(format).quantize(linear())
    layer.bias = None
    y = layer(x)
    assert not y[:2].isfinite().any()
    assert y[2:].isfinite().all()
    assert not y[2].any()


@pytest.mark.parametrize("format", NAMES)
def test_backward_keeps_only_the_quantized_weight_and_checkpointing_changes_nothing(format):
    """bitsandbytes' own layers keep their inputs where gradient checkpointing does not see it."""
    layer = quantization(format).quantize(linear())
    kept, gradients = [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(3, 128, requires_grad=True))
    assert [tensor.data_ptr() for tensor in kept] == [part.data_ptr() for part in layer.parts()]
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = torch.linspace(-1, 1, 128).requires_grad_()
        run(x.view(1, -1)).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_fused_kernels_give_pytorchs_bits(monkeypatch):
    """Test every byte value, compiled for the CPU."""
    monkeypatch.setattr(linear_layers, "FUSES", {"cpu": 0})
    torch._dynamo.reset()
    count, scale = torch.arange(200_000), torch.linspace(1e-4, 3, 200)[:, None]
    for kind in (E4M3, torch.int8):
        weight = (count % 251 + count // 251).to(torch.uint8).view(200, 1000).view(kind)
        for dtype in (torch.bfloat16, torch.float32):
            found, wanted = eight_bit.scaled_rows(weight, scale, dtype), weight.to(dtype).mul_(scale)
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        assert torch.equal(eight_bit.transposed(weight).view(torch.uint8), weight.view(torch.uint8).t())
    assert not linear_layers._UNFUSED
