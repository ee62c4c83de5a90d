"""float8: rounding a matrix to it row by row, and products on tensor cores (arXiv 2209.05433)."""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from datamodules.files import reason

log = logging.getLogger("retouch")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rows and columns of a matrix as transformers have them, to try kernels with: for a small one there may be none.
PROBE = (256, 3072)
# Devices on which rounding is worth a kernel of its own.
FUSES = ("cuda",)


def scaled_product(rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor) -> Tensor:
    """(n, k) in float8 and (n, 1), by (k, m) in e4m3 and (1, m) -> (n, m) in bf16, on tensor cores.

    Args:
        columns: column by column in memory.
    """
    return torch._scaled_mm(
        rows,
        columns,
        scale_a=row_scales,
        scale_b=column_scales,
        out_dtype=torch.bfloat16,
        use_fast_accum=rows.dtype == E4M3,  # gradients are added up in float32
    )


@cache
def has_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows of this float8 dtype can be multiplied there: from compute capability 8.9 on, if there is a kernel.

    AMD's fp8 is another.
    """
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    samples, side = PROBE
    try:
        rows, columns = (torch.zeros(n, side, device=device).to(kind) for n, kind in ((samples, dtype), (side, E4M3)))
        scaled_product(rows, torch.ones(samples, 1, device=device), columns.t(), torch.ones(1, side, device=device))
    except RuntimeError as error:
        first = reason(error)
        log.warning(f"note: fp8 tensor cores cannot be used here with {str(dtype).removeprefix('torch.')}: {first}")
        return False
    return True


def row_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., n) -> (..., 1), float32: a row's largest magnitude over the largest number of a float8 dtype."""
    return (x.abs().amax(-1, keepdim=True).float() / torch.finfo(dtype).max).clamp_min(torch.finfo(torch.float32).tiny)


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale; a conversion alone would make NaN of what rounding lifts above the largest number."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(n, k) -> float8 (n, k) and scales (n, 1) in float32."""
    # torch.compile makes a graph of its own for a single row, as of modulation, and for each mode that it is called in.
    if len(x) == 1:
        rows, scale = _quantize_rows(x, dtype)
    else:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            rows, scale = _fused_rows(x.device)(x.detach(), dtype)
    return rows.contiguous(), scale


def _quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = row_scale(x, dtype)
    return to_float8(x, scale, dtype), scale


@cache
def _fused_rows(device: torch.device) -> Any:
    """On a GPU one kernel that reads x once: as separate operations this would eat what tensor cores gain."""
    if device.type not in FUSES:
        return _quantize_rows
    fused = torch.compile(_quantize_rows, dynamic=True)
    try:
        for dtype in (E4M3, E5M2):
            # Of two sizes: where they are one, so they would be in the graph.
            fused(torch.ones(PROBE, device=device, dtype=torch.bfloat16), dtype)
    except (RuntimeError, OSError) as error:
        first = reason(error)
        log.warning(f"note: fp8 is slower than it could be: torch.compile does not run here: {first}")
        return _quantize_rows
    return fused


def kernels(device: torch.device, gradient_dtype: torch.dtype) -> str:
    """What multiplies layers in fp8 there, in words.

    Args:
        gradient_dtype: float8_e5m2, or any other for gradients that stay as they are.
    """
    products = has_tensor_cores(device, E4M3)
    gradients = gradient_dtype == E5M2 and has_tensor_cores(device, E5M2)
    if not (products or gradients):
        return "weights only: its tensor cores are not used here"
    used = "products and gradients" if products and gradients else f"{'products' if products else 'gradients'} only"
    return f"tensor cores for {used}"
