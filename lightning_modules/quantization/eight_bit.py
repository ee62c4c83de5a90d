"""fp8 (arXiv 2209.05433), multiplied on tensor cores where there are any, and int8 by optimum-quanto.

8 bits a weight and a scale for each row. Products of int8 run in the dtype of the activations.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from datamodules.files import reason
from lightning_modules.quantization.linear import (
    SCALED,
    SCALES,
    STORAGES,
    QuantizationFormat,
    QuantizedLinear,
    Scaled,
    Storage,
    fused,
    in_pieces,
    scaled_rows,
    stored_scale,
    transposed,
)

log = logging.getLogger("retouch")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The dtypes by their names in safetensors.
FLOAT8 = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
# Tensor cores need matrices whose sides are multiples of this.
TILE = 16
# Rows and columns of a matrix to probe kernels with, as in transformers: there may be none for a small one.
PROBE = (256, 3072)


class Float8(Scaled):
    """A float8 weight and its scales, multiplied on fp8 tensor cores where there are any.

    Activations are quantized to e4m3 and gradients to e5m2, each row with its own scale.
    """

    def product(self, x: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        weight, scale = parts
        out_features, in_features = shape
        if not _on_tensor_cores(x, weight):
            return super().product(x, parts, shape)
        rows, row_scales = quantize_rows(x.reshape(-1, in_features), E4M3)
        # The second matrix is weight^T, column by column, so its rows' scales are the columns'.
        column_scales = scale.expand(out_features, 1).reshape(1, -1).contiguous()
        y = scaled_product(rows, row_scales, weight.t(), column_scales)
        return y.view(*x.shape[:-1], out_features).to(x.dtype)

    def input_gradient(self, grad: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        weight, scale = parts
        out_features, in_features = shape
        if not _on_tensor_cores(grad, weight):
            return super().input_gradient(grad, parts, shape)
        # The weight's scales are along the summed dimension, so the gradient is multiplied by them first.
        rows, row_scales = quantize_rows(grad.reshape(-1, out_features) * scale.to(grad.dtype).t(), E5M2)
        ones = torch.ones(1, in_features, device=grad.device)
        # Hopper's tensor cores need the second matrix column by column: a copy of one layer's bytes.
        x = scaled_product(rows, row_scales, transposed(weight).t(), ones)
        return x.view(*grad.shape[:-1], in_features).to(grad.dtype)


STORAGES["fp8"] = Float8


def quantize_fp8(linear: nn.Linear) -> QuantizedLinear:
    """Quantize with per-row scales that are powers of two: multiplying by them is exact and costs no precision."""

    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        mantissa, exponent = torch.frexp(_row_scale(rows, E4M3))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
        return _to_float8(rows, scale, E4M3), scale

    weight, scale = in_pieces(quantize, linear.weight)
    return QuantizedLinear("fp8", weight.shape, linear.weight.dtype, linear.bias, weight=weight, weight_scale=scale)


def read_fp8(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> QuantizedLinear | None:
    """Build a float8 layer with one scale, a scale for each row, or none; a `Read`."""
    weight, scale = parts["weight"], stored_scale(parts, name)
    if weight.dtype not in FLOAT8.values():
        return None
    scale = torch.ones(1, 1, device=weight.device) if scale is None else scale
    return QuantizedLinear("fp8", weight.shape, dtype, parts.get("bias"), weight=weight, weight_scale=scale)


FP8 = QuantizationFormat(8, quantize_fp8, read_fp8, FLOAT8, SCALED, SCALES, marker="scaled_fp8")


def _on_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    fits = weight.shape[0] % TILE == 0 and weight.shape[1] % TILE == 0
    return fits and weight.dtype == E4M3 and has_tensor_cores(x.device)


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """Return whether a device multiplies rows in e4m3 and e5m2; compute capability 8.9 and later, not AMD."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
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


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize (n, k) -> float8 (n, k) and scales (n, 1) in float32."""
    # A single row (modulation) would be one more graph.
    rows, scale = _quantize_rows(x, dtype) if len(x) == 1 else fused(_quantize_rows, x, dtype)
    return rows.contiguous(), scale


def _quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = _row_scale(x, dtype)
    return _to_float8(x, scale, dtype), scale


def _row_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (..., 1) in float32: a row's largest magnitude over the largest value of a float8 dtype."""
    return (x.abs().amax(-1, keepdim=True).float() / torch.finfo(dtype).max).clamp_min(torch.finfo(torch.float32).tiny)


def _to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x / scale; without the clamp, values that round above the largest would become NaN."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


class Int8(Storage):
    """An int8 weight and the largest magnitude of each row (out,)."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, maxima = parts
        return scaled_rows(weight, (maxima / 127)[:, None], dtype)


STORAGES["int8"] = Int8


def quantize_int8(linear: nn.Linear) -> QuantizedLinear:
    """Quantize by optimum-quanto; stored as bitsandbytes stores int8 (arXiv 2208.07339), which diffusers reads."""
    from optimum.quanto import absmax_scale, qint8

    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.float()
        scale = absmax_scale(rows, qint8, axis=0)
        return torch.ops.quanto.quantize_symmetric(rows, torch.int8, 0, scale), 127 * scale.flatten()

    weight, maxima = in_pieces(quantize, linear.weight.data)
    return QuantizedLinear("int8", weight.shape, linear.weight.dtype, linear.bias, weight=weight, SCB=maxima)


def read_int8(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> QuantizedLinear | None:
    """Build a layer in bitsandbytes' layout or in ComfyUI's int8_tensorwise; a `Read`."""
    weight, bias, scale = parts["weight"], parts.get("bias"), stored_scale(parts, name)
    if weight.dtype != torch.int8:
        return None
    if scale is None:
        return QuantizedLinear("int8", weight.shape, dtype, bias, weight=weight, SCB=parts["SCB"].float())
    return QuantizedLinear("scaled", weight.shape, dtype, bias, weight=weight, weight_scale=scale)


INT8 = QuantizationFormat(8, quantize_int8, read_int8, ["I8"], f"SCB|weight_format|{SCALED}", ("SCB", *SCALES))
