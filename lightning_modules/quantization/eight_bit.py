"""fp8 (arXiv 2209.05433) and int8: 8 bits a weight and a scale for each row, multiplied in 8 bits where a device can.

Inputs, and gradients in the backward pass, are rounded to 8 bits with a scale for each token.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from foundation.files import reason
from lightning_modules.blocks import without_autocast
from lightning_modules.quantization.linear import (
    PIECE,
    SCALED,
    SCALES,
    STORAGES,
    QuantizationFormat,
    QuantizedLinear,
    Storage,
    fused,
    in_pieces,
    read_storage,
    stored_scale,
)
from lightning_modules.quantization.triton_products import (
    available,
    has_capability,
    int8_product,
    product_available,
    rounded_rows,
    transposed_bytes,
)

log = logging.getLogger("retouch")

E4M3 = torch.float8_e4m3fn
# The largest values that weights, inputs and gradients are scaled to.
LARGEST_VALUES = {E4M3: 448.0, torch.int8: 127.0}
# Tensor cores need matrices whose sides are multiples of this.
TILE = 16
# Sizes of groups of rotated inputs: powers of four, in ComfyUI's files the largest.
ROTATED_GROUPS = (256, 64, 16, 4)
# Rows and columns of a matrix to probe kernels with, as in transformers: there may be none for a small one.
PROBE = (256, 3072)
# A matrix in 8 bits and its scales, None if they are all 1.
Operand = tuple[Tensor, Tensor | None]


class EightBit(Storage):
    """A weight of one-byte elements and its scales: (out, 1), (1, 1), or the rows' largest magnitudes (out,)."""

    rounded: torch.dtype  # of inputs and gradients

    def runs(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether the device of x multiplies it in 8 bits, if the sides of the weight fit."""
        raise NotImplementedError

    def multiply(self, left: tuple[Tensor, Tensor], right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply (n, k) with scales (n, 1) by (k, m) with scales (1, m) or none, add a bias (m,) -> (n, m)."""
        raise NotImplementedError

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return rotate(scaled_rows(*_with_scale(parts), dtype), self.group)

    def product(
        self, x: Tensor, parts: Sequence[Tensor], shape: tuple[int, int], bias: Tensor | None, rounds: bool
    ) -> Tensor:
        if not (rounds and self._rounds(x, parts[0])):
            return super().product(x, parts, shape, bias, rounds)
        weight, scale = _with_scale(parts)
        columns = weight.t(), scale.expand(shape[0], 1).t().contiguous()
        y = self.multiply(round_rows(x, self.rounded, group=self.group), columns, bias, x.dtype)
        return y.view(*x.shape[:-1], shape[0])

    def input_gradient(self, grad: Tensor, parts: Sequence[Tensor], shape: tuple[int, int], rounds: bool) -> Tensor:
        if not (rounds and self._rounds(grad, parts[0])):
            return super().input_gradient(grad, parts, shape, rounds)
        # The weight's scales are along the summed dimension, so the gradient is multiplied by them first.
        weight, scale = _with_scale(parts)
        multiply = _gradient_operator if torch.compiler.is_compiling() else _gradient
        x = multiply(*round_rows(grad, self.rounded, scale.t()), weight, self.name, grad.dtype)
        return rotate(x, self.group).view(*grad.shape[:-1], shape[1])

    def _rounds(self, x: Tensor, weight: Tensor) -> bool:
        return all(side % TILE == 0 for side in weight.shape) and self.runs(x, weight)


def _gradient(rows: Tensor, scales: Tensor, weight: Tensor, storage: str, dtype: torch.dtype) -> Tensor:
    arithmetic: Any = read_storage(storage)
    return arithmetic.multiply((rows, scales), (weight, None), None, dtype)


# An operator: torch.compile would transpose weights in the forward pass, and keep them for the backward pass.
_gradient_operator = torch.library.custom_op("retouch::rounded_gradient", _gradient, mutates_args=())
_gradient_operator.register_fake(
    lambda rows, scales, weight, *more: rows.new_empty(len(rows), weight.shape[1], dtype=more[-1])
)


class Float8(EightBit):
    """A float8 weight, multiplied on fp8 tensor cores where there are any."""

    rounded = E4M3  # gradients too: scaled by rows they need no wider range, and e5m2 errs more

    def runs(self, x: Tensor, weight: Tensor) -> bool:
        return weight.dtype == E4M3 and has_tensor_cores(x.device)

    def multiply(self, left: tuple[Tensor, Tensor], right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        (rows, row_scales), (columns, column_scales) = left, right
        in_forward = column_scales is not None
        if column_scales is None:
            columns = transposed(columns).t()  # Hopper's tensor cores read them column by column
            column_scales = torch.ones(1, columns.shape[1], device=columns.device)
        added = bias if dtype == torch.bfloat16 else None
        y = scaled_product(rows, row_scales, columns, column_scales, added, in_forward).to(dtype)
        return y if bias is None or added is not None else y.add_(bias)


class Int8(EightBit):
    """An int8 weight, multiplied by int8 inputs and gradients.

    Args:
        group: number of inputs that are rotated together, as the weight's were; 1 for none.
    """

    rounded = torch.int8

    def __init__(self, group: str = "1") -> None:
        self.group = int(group)

    def runs(self, x: Tensor, weight: Tensor) -> bool:
        # CUDA needs more than 16 rows; modulation, which has one, affects everything.
        return x.numel() > TILE * x.shape[-1] and multiplies_int8(x.device)

    def multiply(self, left: tuple[Tensor, Tensor], right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        traced = torch.compiler.is_compiling() and left[0].is_cuda
        return (_int8_operator if traced else _int8)(*left, *right, bias, dtype)


def _int8(
    rows: Tensor,
    row_scales: Tensor,
    columns: Tensor,
    column_scales: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if product_available(rows.device):
        return int8_product(rows, row_scales, columns, column_scales, bias, dtype)
    if rows.is_cuda and columns.stride(0) != 1:  # which cuBLAS 13 refuses on some cards
        columns = transposed(columns).t()
    return fused(_rescaled, torch._int_mm(rows, columns), row_scales, column_scales, bias, dtype)


# torch.compile does not trace a kernel that is tuned in this way.
_int8_operator = torch.library.custom_op("retouch::int8_product", _int8, mutates_args=())
_int8_operator.register_fake(
    lambda rows, _, columns, *more: rows.new_empty(len(rows), columns.shape[1], dtype=more[-1])
)
STORAGES.update({"fp8": Float8, "int8_w8a8": Int8})


def quantize_fp8(linear: nn.Linear) -> QuantizedLinear:
    """Quantize with per-row scales that are powers of two: multiplying by them is exact and costs no precision."""

    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        mantissa, exponent = torch.frexp(_row_scale(rows.float(), E4M3))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
        return _rounded(rows.float() / scale, E4M3), scale

    weight, scale = in_pieces(quantize, linear.weight)
    return QuantizedLinear("fp8", weight.shape, linear.weight.dtype, linear.bias, weight=weight, weight_scale=scale)


def read_fp8(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, group: int) -> QuantizedLinear:
    """Build a float8 layer with one scale, a scale for each row, or none; a `Read`."""
    weight, scale = parts["weight"], stored_scale(parts, name)
    scale = torch.ones(1, 1, device=weight.device) if scale is None else scale
    return QuantizedLinear("fp8", weight.shape, dtype, parts.get("bias"), weight=weight, weight_scale=scale)


def quantize_int8(linear: nn.Linear, groups: Sequence[int] = ()) -> QuantizedLinear:
    """Quantize by optimum-quanto; stored as by bitsandbytes (arXiv 2208.07339), rotated as by ComfyUI.

    Args:
        groups: sizes of groups of rotated inputs, of which the first that fits is used.
    """
    from optimum.quanto import absmax_scale, qint8

    group = next((size for size in groups if linear.in_features % size == 0), 1)

    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rotate(rows.float(), group)
        scale = absmax_scale(rows, qint8, axis=0)
        return torch.ops.quanto.quantize_symmetric(rows, torch.int8, 0, scale), scale

    weight, scale = in_pieces(quantize, linear.weight.data)
    parts = {"weight": weight} | ({"SCB": 127 * scale.flatten()} if group == 1 else {"weight_scale": scale})
    return QuantizedLinear(f"int8_w8a8 {group}", weight.shape, linear.weight.dtype, linear.bias, **parts)


def quantize_rotated(linear: nn.Linear) -> QuantizedLinear:
    """Quantize to int8 with inputs that are rotated in the largest groups that fit."""
    return quantize_int8(linear, ROTATED_GROUPS)


def read_int8(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, group: int) -> QuantizedLinear:
    """Build a layer in bitsandbytes' layout or in ComfyUI's int8_tensorwise; a `Read`."""
    weight, scale = parts["weight"], stored_scale(parts, name)
    scales = {"SCB": parts["SCB"].float()} if scale is None else {"weight_scale": scale}
    return QuantizedLinear(f"int8_w8a8 {group}", weight.shape, dtype, parts.get("bias"), weight=weight, **scales)


FP8 = QuantizationFormat(8, quantize_fp8, read_fp8, ["F8_E4M3", "F8_E5M2"], SCALED, SCALES, marker="scaled_fp8")
INT8 = QuantizationFormat(8, quantize_int8, read_int8, ["I8"], f"SCB|weight_format|{SCALED}", ("SCB", *SCALES))


@torch.compiler.assume_constant_result
def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a device multiplies rows in e4m3; compute capability 8.9 and later, not AMD."""
    return _probe(device)


@cache
def _probe(device: torch.device) -> bool:
    if not has_capability(device, (8, 9)):
        return False
    samples, side = PROBE
    scales, columns = torch.ones(1, side, device=device), torch.zeros(side, side, device=device).to(E4M3).t()
    rows, bias = torch.zeros(PROBE, device=device).to(E4M3), torch.zeros(side, device=device, dtype=torch.bfloat16)
    try:
        for fast in (True, False):
            scaled_product(rows, torch.ones(samples, 1, device=device), columns, scales, bias, fast)
    except RuntimeError as error:
        log.warning(f"note: fp8 tensor cores cannot be used here: {reason(error)}")
        return False
    return True


@torch.compiler.assume_constant_result
def multiplies_int8(device: torch.device) -> bool:
    """Return whether a device multiplies int8: an x86 CPU, or compute capability 7.5 and later, not AMD."""
    if device.type == "cpu":  # on others PyTorch may multiply in a plain loop
        return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return has_capability(device, (7, 5))


def scaled_product(
    rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor, bias: Tensor | None, fast: bool
) -> Tensor:
    """Multiply (n, k) in e4m3 with scales (n, 1) by (k, m) in e4m3 with scales (1, m) -> (n, m) in bf16.

    Args:
        columns: column by column in memory.
        bias: (m,) in bf16.
        fast: whether sums may be less precise than float32, as suits inputs but not gradients.
    """
    return torch._scaled_mm(
        rows,
        columns,
        scale_a=row_scales,
        scale_b=column_scales,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


# The tensor that was rounded last, its version and the kind of rounding, and the result: q, k and v have one input.
_last: tuple[weakref.ref[Tensor], object, tuple[Tensor, Tensor]] | None = None


def round_rows(x: Tensor, dtype: torch.dtype, factors: Tensor | None = None, group: int = 1) -> tuple[Tensor, Tensor]:
    """Round (..., k), rotated, or times factors (1, k) or (1, 1), to 8 bits -> (n, k), and scales (n, 1) in float32."""
    global _last
    if torch.compiler.is_compiling() or factors is not None or x.is_inference():
        return _round(x, dtype, factors, group)
    last, kind = _last, (x._version, dtype, group)  # CUDA's backward pass has its own thread
    if last is None or last[0]() is not x or last[1] != kind:
        last = _last = weakref.ref(x, _forget), kind, _round(x, dtype, None, group)
    return last[2]


def _forget(dead: weakref.ref[Tensor]) -> None:
    global _last
    if _last is not None and _last[0] is dead:
        _last = None


def _round(x: Tensor, dtype: torch.dtype, factors: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    x = rotate(x.reshape(-1, x.shape[-1]), group)
    if not torch.compiler.is_compiling() and available(x.device):
        return rounded_rows(x if x.stride(1) == 1 else x.contiguous(), dtype, factors, LARGEST_VALUES[dtype])
    x = x.contiguous()  # as products read the result
    # A single row (modulation) would be one more graph.
    return _round_rows(x, dtype, factors) if len(x) == 1 else fused(_round_rows, x, dtype, factors)


def rotate(x: Tensor, group: int) -> Tensor:
    """Rotate each group of (n, k), which spreads outliers (ConvRot, arXiv 2512.03673); a second rotation returns x."""
    if group == 1:
        return x
    return _rotated(x, group) if torch.compiler.is_compiling() else _rotate(x, group)


@torch.no_grad()
def _rotate(x: Tensor, group: int) -> Tensor:
    with without_autocast(x.device):
        if x.device.type != "cpu":
            return (x.reshape(-1, group) @ _hadamard(group, x.dtype, x.device)).view(x.shape)
        # Two small factors of the matrix and pieces in a CPU's cache take a quarter of the time.
        side, count = min(group, 16), max(1, PIECE // x.shape[1])
        right, left = _hadamard(side, x.dtype, x.device), _hadamard(group // side, x.dtype, x.device)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows, rotated in zip(x.split(count), y.split(count), strict=True):
            parts = (rows.reshape(-1, side) @ right).view(-1, len(left), side)
            rotated.copy_((parts if len(left) == 1 else left @ parts).view(rotated.shape))
        return y


# An operator: torch.compile would trace the matrices.
_rotated = torch.library.custom_op("retouch::rotated", _rotate, mutates_args=())
_rotated.register_fake(lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format))


@cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the regular Hadamard matrix (size, size) of a power of four, over its root: orthogonal and symmetric."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    factor = 0.5 - torch.eye(4, dtype=dtype, device=device).flip(0)
    while len(matrix) < size:
        matrix = torch.kron(matrix, factor)
    return matrix


def _round_rows(x: Tensor, dtype: torch.dtype, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x.float() if factors is None else x.float() * factors
    scale = _row_scale(x, dtype)
    return _rounded(x / scale, dtype), scale


def _row_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (..., 1): a row's largest magnitude over the largest value of an 8-bit dtype."""
    return (x.abs().amax(-1, keepdim=True) / LARGEST_VALUES[dtype]).clamp_min(torch.finfo(torch.float32).tiny)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to an 8-bit dtype; without the clamp, values that round above the largest would become NaN."""
    x = x.round() if dtype == torch.int8 else x
    return x.clamp(-LARGEST_VALUES[dtype], LARGEST_VALUES[dtype]).to(dtype)


def _rescaled(
    sums: Tensor, row_scales: Tensor, column_scales: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    y = sums.float() * row_scales
    y = y if column_scales is None else y * column_scales
    return (y if bias is None else y + bias).to(dtype)


def _with_scale(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the weight and its scale (out, 1) or (1, 1)."""
    weight, scale = parts
    return weight, scale if scale.dim() == 2 else (scale / 127)[:, None]


def scaled_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply (out, in) in float8 or int8 by scales (out, 1) or (1, 1), rounding once to a 16- or 32-bit dtype."""
    return fused(_scaled_rows, weight, scale, dtype)


def _scaled_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).mul_(scale)


def transposed(weight: Tensor) -> Tensor:
    """Transpose (out, in) of one-byte elements -> (in, out), contiguous."""
    if available(weight.device):
        return transposed_bytes(weight)
    return weight.view(torch.uint8).t().contiguous().view(weight.dtype)
