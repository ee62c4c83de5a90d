"""The kernels of `fused`: importing this needs Triton, and calling them a GPU or Triton's interpreter."""

import triton
import triton.language as tl


@triton.jit
def scale_rows(
    weight: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    is_int8: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """out[i, j] = weight[i, j] * scale[i], of bytes that are int8 or float8_e4m3fn."""
    i = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    j = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    place = i[:, None] * columns + j[None, :]
    code = tl.load(weight + place, mask=inside, other=0)
    if is_int8:
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        # As bits of a float16, whose exponents begin 8 lower: exact, subnormals too.
        magnitude = code.to(tl.uint16) & 0x7F
        half = ((code.to(tl.uint16) & 0x80) << 8) | (magnitude << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    value *= tl.load(scale + i, mask=i < rows, other=0.0)[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        # To the nearest, ties to even; by hand, for Triton's interpreter cuts off.
        bits = value.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        nearest = tl.where(value != value, 0x7FC0, nearest).to(tl.uint16)
        tl.store(out + place, nearest.to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def transpose(weight: tl.tensor, out: tl.tensor, rows: tl.tensor, columns: tl.tensor, tile: tl.constexpr) -> None:
    """out[j, i] = weight[i, j], of bytes."""
    i = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    j = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    block = tl.load(weight + i[:, None] * columns + j[None, :], mask=inside, other=0)
    tl.store(out + j[:, None] * rows + i[None, :], tl.trans(block), mask=tl.trans(inside))
