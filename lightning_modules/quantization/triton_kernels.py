"""Triton kernels that dequantize and transpose a weight: the bits of PyTorch's operators, with less memory traffic.

Importing this needs Triton; calling it needs a GPU or Triton's interpreter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64


def scale_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply (out, in) in int8 or float8_e4m3fn by scales (out, 1) or (1, 1) -> (out, in) in `dtype`."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    scale = scale.float().expand(rows, 1).contiguous()
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    is_int8 = int(weight.dtype == torch.int8)
    scale_rows_kernel[grid](weight.contiguous().view(torch.uint8), scale, out, rows, columns, is_int8, TILE)
    return out


def transpose(weight: Tensor) -> Tensor:
    """Transpose (out, in) of one-byte elements -> (in, out), contiguous."""
    rows, columns = weight.shape
    out = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    transpose_kernel[grid](weight.contiguous().view(torch.uint8), out, rows, columns, TILE)
    return out.view(weight.dtype)


@triton.jit
def scale_rows_kernel(
    weight: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    is_int8: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Compute out[i, j] = weight[i, j] * scale[i], of bytes that are int8 or float8_e4m3fn."""
    i = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    j = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    place = i[:, None] * columns + j[None, :]
    code = tl.load(weight + place, mask=inside, other=0)
    if is_int8:
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        # Triton's own conversion needs compute capability 8.9. As the bits of a float16, whose exponents begin 8 lower:
        # exact, subnormals included.
        magnitude = code.to(tl.uint16) & 0x7F
        half = ((code.to(tl.uint16) & 0x80) << 8) | (magnitude << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    value *= tl.load(scale + i, mask=i < rows, other=0.0)[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        # To nearest, ties to even; by hand, since Triton's interpreter truncates.
        bits = value.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        nearest = tl.where(value != value, 0x7FC0, nearest).to(tl.uint16)
        tl.store(out + place, nearest.to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def transpose_kernel(
    weight: tl.tensor, out: tl.tensor, rows: tl.tensor, columns: tl.tensor, tile: tl.constexpr
) -> None:
    """Compute out[j, i] = weight[i, j], of bytes."""
    i = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    j = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    block = tl.load(weight + i[:, None] * columns + j[None, :], mask=inside, other=0)
    tl.store(out + j[:, None] * rows + i[None, :], tl.trans(block), mask=tl.trans(inside))
