"""Products of int8 matrices on NVIDIA tensor cores, summed in int32 and scaled in the same kernel, in Triton."""

import logging
import subprocess
from functools import cache
from typing import Any

import torch
from torch import Tensor

from datamodules.files import reason

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
                total = tl.dot(a, b, total)
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


def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Return whether a device is an NVIDIA GPU of at least this compute capability."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= least


@cache
def available(device: torch.device) -> bool:
    """Return whether `int8_product` runs on a device: compute capability 8.0 or later (Triton 3.8's bound), not AMD."""
    if not has_capability(device, (8, 0)):
        return False
    try:
        from triton.errors import TritonError
    except ImportError:
        return False
    try:
        one, scale = torch.ones(16, 16, device=device, dtype=torch.int8), torch.ones(16, 1, device=device)
        int8_product(one, scale, one.t(), None, None, torch.bfloat16)
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:  # no C compiler
        log.warning(f"note: Triton cannot be used here: {reason(error)}")
        return False
    return True
