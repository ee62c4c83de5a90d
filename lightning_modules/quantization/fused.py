"""Quantized weights times their scales, and transposed, by Triton where it runs: the same bits, fewer bytes moved."""

import logging
from functools import cache

import torch
from torch import Tensor

from datamodules.files import reason

log = logging.getLogger("retouch")

TILE = 64
# The shape of a weight to try the kernels on. No tile divides it.
PROBE = (200, 1000)
# What bytes are. Triton's own conversion of float8 needs compute capability 8.9, whose cards rarely need it.
KINDS = {torch.float8_e4m3fn: 0, torch.int8: 1}


def scaled_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(out, in) in float8 or int8, times (out, 1) or (1, 1) in float32, rounded once to a 16- or 32-bit dtype."""
    fused = weight.dtype in KINDS and _runs(weight.device)
    return _scale_rows(weight, scale, dtype) if fused else weight.to(dtype).mul_(scale)


def transposed(weight: Tensor) -> Tensor:
    """(out, in), of one byte each -> (in, out), contiguous."""
    return _transpose(weight) if _runs(weight.device) else weight.t().contiguous()


def _scale_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    from lightning_modules.quantization.triton_kernels import scale_rows

    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    scale = scale.float().expand(rows, 1).contiguous()
    grid = (-(-rows // TILE), -(-columns // TILE))
    scale_rows[grid](weight.contiguous().view(torch.uint8), scale, out, rows, columns, KINDS[weight.dtype], TILE)
    return out


def _transpose(weight: Tensor) -> Tensor:
    from lightning_modules.quantization.triton_kernels import transpose

    rows, columns = weight.shape
    out = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    grid = (-(-rows // TILE), -(-columns // TILE))
    transpose[grid](weight.contiguous().view(torch.uint8), out, rows, columns, TILE)
    return out.view(weight.dtype)


@cache
def _runs(device: torch.device) -> bool:
    """Whether Triton runs there, and gives what PyTorch gives; tried once."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    try:
        wrong = disagreements(device)
    except Exception as error:  # a compiler has many ways to fail, and there is another way
        wrong = [reason(error)]
    if wrong:
        log.warning(f"note: quantized weights are slower than they could be: Triton does not run here: {wrong[0]}")
    return not wrong


def disagreements(device: torch.device) -> list[str]:
    """What Triton does otherwise than PyTorch there, with all bytes and in all dtypes."""
    count = torch.arange(PROBE[0] * PROBE[1], device=device)
    scale = torch.linspace(1e-4, 3, PROBE[0], device=device)[:, None]
    wrong = []
    for kind in KINDS:
        weight = (count % 251 + count // 251).to(torch.uint8).view(PROBE).view(kind)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if not _same(_scale_rows(weight, scale, dtype), weight.to(dtype).mul_(scale)):
                wrong.append(f"{kind} times scales is another {dtype}")
        if not _same(_transpose(weight), weight.t()):
            wrong.append(f"another transpose of {kind}")
    return wrong


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = one.float(), other.float()
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
