"""fp8 (arXiv 2209.05433) and int8: 8 bits a weight and a scale for each row, multiplied in 8 bits where a device can.

Inputs, and gradients in the backward pass, are rounded to 8 bits with a scale for each token.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from datamodules.files import reason
from lightning_modules.execution.blocks import without_autocast
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
    stored_scale,
)
from lightning_modules.quantization.triton_products import available, has_capability, int8_product

log = logging.getLogger("retouch")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The dtypes by their names in safetensors.
FLOAT8 = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
# The largest values that weights, inputs and gradients are scaled to.
LARGEST = {E4M3: 448.0, E5M2: 57344.0, torch.int8: 127.0}
# Tensor cores need matrices whose sides are multiples of this.
TILE = 16
# Sizes of groups of rotated inputs: powers of four, in ComfyUI's files the largest.
GROUPS = (256, 64, 16, 4)
# Rows and columns of a matrix to probe kernels with, as in transformers: there may be none for a small one.
PROBE = (256, 3072)
# A matrix in 8 bits and its scales, None if they are all 1.
Operand = tuple[Tensor, Tensor | None]


class EightBit(Storage):
    """A weight of one-byte elements and its scales: (out, 1), (1, 1), or the rows' largest magnitudes (out,)."""

    inputs: torch.dtype
    gradients: torch.dtype

    def runs(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether the device of x multiplies it in 8 bits, if the sides of the weight fit."""
        raise NotImplementedError

    def multiply(self, left: tuple[Tensor, Tensor], right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply (n, k) with scales (n, 1) by (k, m) with scales (1, m) or none, add a bias (m,) -> (n, m)."""
        raise NotImplementedError

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return rotate(scaled_rows(*_with_scale(parts), dtype), self.group)

    def round_inputs(self, x: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        return round_rows(x, self.inputs, group=self.group) if self._rounds(x, parts[0]) else []

    def round_gradients(self, grad: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        # The weight's scales are along the summed dimension, so the gradient is multiplied by them first.
        return round_rows(grad, self.gradients, _with_scale(parts)[1].t()) if self._rounds(grad, parts[0]) else []

    def _rounds(self, x: Tensor, weight: Tensor) -> bool:
        return all(side % TILE == 0 for side in weight.shape) and self.runs(x, weight)

    def product(
        self, x: Tensor, rounded: Sequence[Tensor], parts: Sequence[Tensor], shape: tuple[int, int], bias: Tensor | None
    ) -> Tensor:
        if not rounded:
            return super().product(x, rounded, parts, shape, bias)
        (rows, row_scales), (weight, scale) = rounded, _with_scale(parts)
        column_scales = scale.expand(shape[0], 1).t().contiguous()
        y = self.multiply((rows, row_scales), (weight.t(), column_scales), bias, x.dtype)
        return y.view(*x.shape[:-1], shape[0])

    def input_gradient(
        self, grad: Tensor, rounded: Sequence[Tensor], parts: Sequence[Tensor], shape: tuple[int, int]
    ) -> Tensor:
        if not rounded:
            return super().input_gradient(grad, rounded, parts, shape)
        rows, row_scales = rounded
        x = self.multiply((rows, row_scales), (parts[0], None), None, grad.dtype)
        if self.group > 1:
            _rotate(x, x, self.group)
        return x.view(*grad.shape[:-1], shape[1])


class Float8(EightBit):
    """A float8 weight, multiplied on fp8 tensor cores where there are any."""

    inputs, gradients = E4M3, E5M2

    def runs(self, x: Tensor, weight: Tensor) -> bool:
        return weight.dtype == E4M3 and has_tensor_cores(x.device)

    def multiply(self, left: tuple[Tensor, Tensor], right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        (rows, row_scales), (columns, column_scales) = left, right
        if columns.stride(0) != 1:  # Hopper's tensor cores need them column by column: a copy of one layer's bytes
            columns = transposed(columns).t()
        if column_scales is None:
            column_scales = torch.ones(1, columns.shape[1], device=columns.device)
        y = scaled_product(rows, row_scales, columns, column_scales).to(dtype)
        return y if bias is None else y.add_(bias)


class Int8(EightBit):
    """An int8 weight, multiplied by int8 inputs and gradients.

    Args:
        group: inputs that are rotated together, as were those of the weight; 1 for none.
    """

    inputs = gradients = torch.int8

    def __init__(self, group: str = "1") -> None:
        self.group = int(group)

    def runs(self, x: Tensor, weight: Tensor) -> bool:
        # CUDA needs more than 16 rows; modulation, which has one, affects everything.
        return x.numel() > TILE * x.shape[-1] and multiplies_int8(x.device)

    def multiply(self, left: tuple[Tensor, Tensor], right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        (rows, row_scales), (columns, column_scales) = left, right
        if available(rows.device):
            return int8_product(rows, row_scales, columns, column_scales, bias, dtype)
        if rows.is_cuda and columns.stride(0) != 1:  # which cuBLAS 13 refuses on some cards
            columns = transposed(columns).t()
        return fused(_rescaled, torch._int_mm(rows, columns), row_scales, column_scales, bias, dtype)


STORAGES |= {"fp8": Float8, "int8_w8a8": Int8}


def quantize_fp8(linear: nn.Linear) -> QuantizedLinear:
    """Quantize with per-row scales that are powers of two: multiplying by them is exact and costs no precision."""

    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        mantissa, exponent = torch.frexp(_row_scale(rows.float(), E4M3))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
        return _rounded(rows.float() / scale, E4M3), scale

    weight, scale = in_pieces(quantize, linear.weight)
    return QuantizedLinear("fp8", weight.shape, linear.weight.dtype, linear.bias, weight=weight, weight_scale=scale)


def read_fp8(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, group: int) -> QuantizedLinear | None:
    """Build a float8 layer with one scale, a scale for each row, or none; a `Read`."""
    weight, scale = parts["weight"], stored_scale(parts, name)
    if weight.dtype not in FLOAT8.values():
        return None
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


def read_int8(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, group: int) -> QuantizedLinear | None:
    """Build a layer in bitsandbytes' layout or in ComfyUI's int8_tensorwise; a `Read`."""
    weight, scale = parts["weight"], stored_scale(parts, name)
    if weight.dtype != torch.int8:
        return None
    scales = {"SCB": parts["SCB"].float()} if scale is None else {"weight_scale": scale}
    return QuantizedLinear(f"int8_w8a8 {group}", weight.shape, dtype, parts.get("bias"), weight=weight, **scales)


FP8 = QuantizationFormat(8, quantize_fp8, read_fp8, FLOAT8, SCALED, SCALES, marker="scaled_fp8")
INT8 = QuantizationFormat(8, quantize_int8, read_int8, ["I8"], f"SCB|weight_format|{SCALED}", ("SCB", *SCALES))


@torch.compiler.assume_constant_result
def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a device multiplies rows in e4m3 and e5m2; compute capability 8.9 and later, not AMD."""
    return _probe(device)


@cache
def _probe(device: torch.device) -> bool:
    if not has_capability(device, (8, 9)):
        return False
    samples, side = PROBE
    scales, columns = torch.ones(1, side, device=device), torch.zeros(side, side, device=device).to(E4M3).t()
    try:
        for dtype in (E4M3, E5M2):
            rows = torch.zeros(PROBE, device=device).to(dtype)
            scaled_product(rows, torch.ones(samples, 1, device=device), columns, scales)
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


def scaled_product(rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor) -> Tensor:
    """Multiply (n, k) in float8 with scales (n, 1) by (k, m) in e4m3 with scales (1, m) -> (n, m) in bf16.

    Args:
        columns: column by column in memory.
    """
    return torch._scaled_mm(
        rows,
        columns,
        scale_a=row_scales,
        scale_b=column_scales,
        out_dtype=torch.bfloat16,
        use_fast_accum=rows.dtype == E4M3,  # gradients are summed in float32
    )


# The tensor that was rounded last, by which it is recognized, and the result: q, k and v have one input.
_last: tuple[object, list[Tensor]] = (None, [])


def round_rows(x: Tensor, dtype: torch.dtype, factors: Tensor | None = None, group: int = 1) -> list[Tensor]:
    """Round (..., k), rotated, or times factors (1, k) or (1, 1), to 8 bits -> (n, k), and scales (n, 1) in float32."""
    global _last
    flat = x.reshape(-1, x.shape[-1]).contiguous()  # as products read the result
    # A single row (modulation) would be one more graph.
    if torch.compiler.is_compiling() or len(flat) == 1:
        return list(_round_rows(rotate(flat, group), dtype, factors))
    if factors is not None or x.is_inference():
        return list(fused(_round_rows, rotate(flat, group), dtype, factors))
    layout = x.storage_offset(), x.shape, x.stride(), x.dtype
    key = StorageWeakRef(x.untyped_storage()), x._version, layout, dtype, group
    last = _last  # CUDA's backward pass has its own thread
    if last[0] != key:
        last = _last = key, list(fused(_round_rows, rotate(flat, group), dtype, None))
    return last[1]


def rotate(x: Tensor, group: int) -> Tensor:
    """Rotate each group of (n, k), which spreads outliers (ConvRot, arXiv 2512.03673); a second rotation returns x."""
    return x if group == 1 else _rotated(x, group)


# An operator: torch.compile would trace the matrices.
@torch.library.custom_op("retouch::rotated", mutates_args=())
def _rotated(x: Tensor, group: int) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rotate(x, y, group)
    return y


_rotated.register_fake(lambda x, group: torch.empty_like(x, memory_format=torch.contiguous_format))


def _rotate(x: Tensor, y: Tensor, group: int) -> None:
    """Write a rotated tensor (n, k) to y, which may be x."""
    # On a CPU, two small factors of the matrix and pieces in its cache take a quarter of the time.
    side, count = (min(group, 16), PIECE // x.shape[1]) if x.device.type == "cpu" else (group, len(x))
    right, left = _hadamard(side, x.dtype, x.device), _hadamard(group // side, x.dtype, x.device)
    with without_autocast(x.device):
        for rows, rotated in zip(x.split(max(1, count)), y.split(max(1, count)), strict=True):
            parts = (rows.reshape(-1, side) @ right).view(-1, len(left), side)
            rotated.copy_((parts if len(left) == 1 else left @ parts).view(rotated.shape))


@cache
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the regular Hadamard matrix (size, size) of a power of four, over its root: orthogonal and symmetric."""
    matrix, factor = (
        torch.ones(1, 1, dtype=dtype, device=device),
        0.5 - torch.eye(4, dtype=dtype, device=device).flip(0),
    )
    while len(matrix) < size:
        matrix = torch.kron(matrix, factor)
    return matrix


def _round_rows(x: Tensor, dtype: torch.dtype, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x.float() if factors is None else x.float() * factors
    scale = _row_scale(x, dtype)
    return _rounded(x / scale, dtype), scale


def _row_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (..., 1): a row's largest magnitude over the largest value of an 8-bit dtype."""
    return (x.abs().amax(-1, keepdim=True) / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to an 8-bit dtype; without the clamp, values that round above the largest would become NaN."""
    x = x.round() if dtype == torch.int8 else x
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


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
    return fused(_transposed, weight.view(torch.uint8)).view(weight.dtype)


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous()
