"""Triton kernels of 8-bit layers for NVIDIA GPUs: int8 products, rounding rows, transposing.

Products are summed in int32 and scaled in the same kernel.
"""

import logging
import subprocess
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foundation.files import reason

log = logging.getLogger("retouch")

# Rows, columns and inner size of a tile, warps, stages: at most 96 KB of shared memory where cards have 99. Several
# blocks of the last fit a multiprocessor, for products with few rows.
TILES = (
    (128, 256, 64, 8, 3),
    (128, 256, 32, 8, 4),
    (256, 128, 32, 8, 4),
    (128, 128, 64, 8, 3),
    (64, 128, 64, 4, 3),
)


@cache
def kernel() -> Any:
    """Build the kernel, autotuned by shape; PyTorch for Windows and for CPUs comes without Triton."""
    import triton
    import triton.language as tl
    from torch.utils.benchmark import Timer

    names = "tile_rows", "tile_columns", "tile_inner"
    configs = [triton.Config(dict(zip(names, sizes, strict=True)), num_warps=w, num_stages=s) for *sizes, w, s in TILES]

    @triton.autotune(
        configs,
        key=["k", "m", "bucket", "stride_k"],
        do_bench=lambda run, **_: [Timer("run()", globals={"run": run}).timeit(10).mean],  # Triton's allocates 256 MB
        cache_results=True,
    )
    @triton.jit(do_not_specialize=["n", "bucket"])
    def multiply(  # type: ignore[no-untyped-def]
        rows, row_scales, columns, column_scales, bias, output, n, k, m, stride_k, stride_m, bucket,  # noqa: ANN001
        scaled: tl.constexpr, biased: tl.constexpr,
        tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_inner: tl.constexpr,
    ) -> None:  # fmt: skip
        # Eight rows of tiles together, column by column, so that they read their operands from the L2 cache.
        group = 8 * tl.cdiv(m, tile_columns)
        block = tl.program_id(0)
        first = block // group * 8
        height = min(tl.cdiv(n, tile_rows) - first, 8)
        i = (first + block % group % height) * tile_rows + tl.arange(0, tile_rows)
        j = block % group // height * tile_columns + tl.arange(0, tile_columns)
        inner = tl.arange(0, tile_inner)
        left = rows + i.to(tl.int64)[:, None] * k + inner[None, :]
        right = columns + inner[:, None] * stride_k + j[None, :] * stride_m
        total = tl.zeros((tile_rows, tile_columns), tl.int32)
        for start in range(0, k, 2 * tile_inner):
            # For a loop with one product Triton prefetches operands on 8.x, each byte in its own register: they spill.
            for half in tl.static_range(2):
                inside = inner < k - start - half * tile_inner
                a = tl.load(left, mask=(i < n)[:, None] & inside[None, :], other=0)
                b = tl.load(right, mask=inside[:, None] & (j < m)[None, :], other=0)
                total = tl.dot(a, b, total, out_dtype=tl.int32)  # which Triton before 3.8 does not infer
                left += tile_inner
                right += tile_inner * stride_k
        y = total.to(tl.float32) * tl.load(row_scales + i, mask=i < n)[:, None]
        if scaled:
            y *= tl.load(column_scales + j, mask=j < m)[None, :]
        if biased:
            y += tl.load(bias + j, mask=j < m).to(tl.float32)[None, :]
        mask = (i < n)[:, None] & (j < m)[None, :]
        tl.store(output + i.to(tl.int64)[:, None] * m + j[None, :], y.to(output.dtype.element_ty), mask=mask)

    return multiply


def int8_product(
    rows: Tensor,
    row_scales: Tensor,
    columns: Tensor,
    column_scales: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply int8 (n, k) by (k, m) and float32 scales (n, 1) and (1, m), add a bias (m,) -> (n, m), rounded once.

    Sums are exact for k below 2^17, so neither the tiles nor the card change a bit.

    Args:
        rows: contiguous.
        columns: contiguous, or the transpose of a contiguous matrix.
    """
    (n, k), m = rows.shape, columns.shape[1]
    output = rows.new_empty(n, m, dtype=dtype)
    bucket = 1 << max(n - 1, 63).bit_length()  # tuned once for all sizes up to a power of two
    scales, added = (row_scales if one is None else one for one in (column_scales, bias))
    with torch.cuda.device_of(rows):
        kernel()[lambda tile: (-(-n // tile["tile_rows"]) * -(-m // tile["tile_columns"]),)](
            rows, row_scales, columns, scales, added, output, n, k, m, *columns.stride(), bucket,
            column_scales is not None, bias is not None,
        )  # fmt: skip
    return output


@cache
def rounding_kernel() -> Any:
    """Build the kernel that rounds rows to 8 bits, by the formula of `eight_bit.round_rows`."""
    import triton
    import triton.language as tl

    @triton.jit
    def round_row(  # type: ignore[no-untyped-def]
        x, factors, output, scales, k, stride, tiny,  # noqa: ANN001
        largest: tl.constexpr, normal: tl.constexpr, eps: tl.constexpr, step: tl.constexpr, block: tl.constexpr,
    ) -> None:  # fmt: skip
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        top = tl.zeros((block,), tl.int32)
        for start in range(0, k, block):
            y = tl.load(x + row * stride + start + at, mask=start + at < k, other=0).to(tl.float32)
            if step is not None:
                y *= tl.load(factors + (start + at) * step, mask=start + at < k, other=0)
            # Magnitudes are in the order of their bits, in which NaN is the largest.
            top = tl.maximum(top, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        scale = tl.div_rn(tl.max(top, 0).to(tl.float32, bitcast=True), largest)
        scale = tl.where(scale < tiny, tiny, scale)
        tl.store(scales + row, scale)
        for start in range(0, k, block):  # the row is in the cache now
            y = tl.load(x + row * stride + start + at, mask=start + at < k, other=0).to(tl.float32)
            if step is not None:
                y *= tl.load(factors + (start + at) * step, mask=start + at < k, other=0)
            y = tl.div_rn(y, scale)
            y = tl.where(y > largest, largest, tl.where(y < -largest, -largest, y))
            # Adding 1.5 * 2^23 steps rounds to a step, half to even; for 8.9 Triton's cast would round twice.
            magic = 12582912.0
            if eps is not None:
                power = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
                magic *= eps * tl.where(power < normal, normal, power)
            y = (y + magic) - magic
            tl.store(output + row * k + start + at, y.to(output.dtype.element_ty), mask=start + at < k)

    return round_row


def rounded_rows(x: Tensor, dtype: torch.dtype, factors: Tensor | None, largest: float) -> tuple[Tensor, Tensor]:
    """Round (n, k), times factors (1, k) or (1, 1) in float32, to (n, k) in 8 bits and scales (n, 1).

    Args:
        x: a matrix with contiguous rows.
        largest: the value that a row's largest magnitude is scaled to.
    """
    n, k = x.shape
    output, scales = x.new_empty(n, k, dtype=dtype), x.new_empty(n, 1, dtype=torch.float32)
    step = None if factors is None else int(factors.shape[1] > 1)
    kind = torch.finfo(dtype) if dtype.is_floating_point else None
    with torch.cuda.device_of(x):
        rounding_kernel()[(n,)](
            x, x if factors is None else factors, output, scales, k, x.stride(0), torch.finfo(torch.float32).tiny,
            largest, kind and kind.tiny, kind and kind.eps, step, 1024,
        )  # fmt: skip
    return output, scales


@cache
def transposing_kernel() -> Any:
    """Build the kernel that transposes a matrix of bytes; PyTorch's own copy reads or writes single bytes."""
    import triton
    import triton.language as tl

    @triton.jit
    def transpose(x, output, n, m, tile: tl.constexpr) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        i = tl.program_id(0) * tile + tl.arange(0, tile)
        j = tl.program_id(1) * tile + tl.arange(0, tile)
        mask = (i < n)[:, None] & (j < m)[None, :]
        part = tl.load(x + i.to(tl.int64)[:, None] * m + j[None, :], mask=mask)
        tl.store(output + j.to(tl.int64)[:, None] * n + i[None, :], tl.trans(part), mask=tl.trans(mask))

    return transpose


def transposed_bytes(x: Tensor) -> Tensor:
    """Transpose (n, m) of one-byte elements -> (m, n), contiguous."""
    (n, m), tile = x.shape, 128
    output = x.new_empty(m, n)
    with torch.cuda.device_of(x):
        transposing_kernel()[(-(-n // tile), -(-m // tile))](x.view(torch.uint8), output.view(torch.uint8), n, m, tile)
    return output


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Return whether a device is an NVIDIA GPU of at least this compute capability."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= least


def available(device: torch.device) -> bool:
    """Return whether `rounded_rows` and `transposed_bytes` run on a device: compute capability 7.5 or later."""
    return device.type == "cuda" and _runs(device, (7, 5))


def product_available(device: torch.device) -> bool:
    """Return whether `int8_product` runs on a device: compute capability 8.0 or later (Triton 3.8's bound), not AMD."""
    return device.type == "cuda" and _runs(device, (8, 0))  # traced on CPUs only


@cache
def _runs(device: torch.device, least: tuple[int, int]) -> bool:
    if not has_capability(device, least):
        return False
    try:
        from triton.errors import TritonError
    except ImportError:
        return False
    try:
        one, scale = torch.ones(16, 16, device=device, dtype=torch.int8), torch.ones(16, 1, device=device)
        if least >= (8, 0):
            int8_product(one, scale, one.t(), None, None, torch.bfloat16)
        else:
            rounded_rows(one.float(), torch.int8, None, 127.0)
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:  # no C compiler
        log.warning(f"note: Triton cannot be used here: {reason(error)}")
        return False
    return True
