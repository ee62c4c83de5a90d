"""Products on fp8 tensor cores, and fused kernels."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Facts
from lightning_modules.quantization.eight_bit import (
    E4M3,
    has_tensor_cores,
    round_rows,
    scaled_product,
    scaled_rows,
    transposed,
)
from lightning_modules.quantization.linear import fused
from lightning_modules.quantization.triton_products import int8_product, product_available


def scaled_mm(bench: Bench, facts: Facts) -> list[str]:
    """torch._scaled_mm by rows: whether it runs, how far from float32 it is, how fast."""
    wrong = []
    large = (bench.size(4608, 64), bench.size(3072, 64), bench.size(3072, 64))
    for rows, inner, outer in (large, (16, 16, 16)):
        x, weight = (torch.randn(n, inner, device=bench.device) for n in (rows, outer))
        exact = x @ weight.t()
        b, b_scales = (part.t() for part in round_rows(weight, E4M3))
        b_scales = b_scales.contiguous()
        a, a_scale = round_rows(x, E4M3)
        rounded = (a.float() * a_scale) @ (b.float() * b_scales)
        for fast in (True, False):
            name = f"{rows}x{inner}x{outer} e4m3{' fast' if fast else ''}"
            product = partial(scaled_product, a, a_scale, b, b_scales, None, fast)
            try:
                y = product().float()
            except (RuntimeError, ValueError) as error:
                facts[name] = f"does not run: {str(error).splitlines()[0]}"
                if (rows, inner, outer) == large:
                    wrong.append(f"{name} does not run")
                continue
            error_of_sum = float((y - rounded).norm() / rounded.norm())
            facts[name] = {
                "error_of_sum": round(error_of_sum, 5),
                "error_of_all": round(float((y - exact).norm() / exact.norm()), 5),
                "tflops": round(2 * rows * inner * outer / bench.seconds(product, 20) / 1e12, 1),
            }
            if not error_of_sum < 0.02:
                wrong.append(f"{name} is {error_of_sum:.3f} from float32's sum of the same numbers")
    facts["tensor cores"] = used = has_tensor_cores(bench.device)
    if bench.cuda and torch.cuda.get_device_capability(bench.device) >= (8, 9) and not used:
        wrong.append("retouch does not use fp8 tensor cores here")
    return wrong


def _scaled(total: Tensor, row_scales: Tensor, column_scales: Tensor) -> Tensor:
    return (total.float() * row_scales * column_scales).to(torch.bfloat16)


def _ways(
    a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, scales: tuple[Tensor, Tensor], gradient: bool
) -> dict[str, Callable[[], Any]]:
    """Return products by name, of bf16 a b and of int8 rows and columns; fp8 needs columns in order."""

    def triton(columns: Tensor) -> Tensor:
        return int8_product(rows, scales[0], columns, scales[1], None, torch.bfloat16)

    def int_mm(columns: Tensor) -> Tensor:
        return fused(_scaled, torch._int_mm(rows, columns), *scales)

    (rows8, row_scales8), (columns8, column_scales8) = (round_rows(x, E4M3) for x in (a, b.t()))
    fp8 = columns8.t().contiguous() if gradient else columns8.t()
    scales8 = row_scales8, column_scales8.t().contiguous()
    ways = {"bf16": lambda: a @ b, "int_mm": lambda: int_mm(columns)}
    ways["fp8"] = lambda: scaled_product(
        rows8, scales8[0], transposed(fp8).t() if gradient else fp8, scales8[1], None, not gradient
    )
    if product_available(rows.device):
        ways["triton"] = lambda: triton(columns)
        if gradient:
            ways["triton, transposed"] = lambda: triton(transposed(columns).t())
    if gradient:
        ways["int_mm, transposed"] = lambda: int_mm(transposed(columns).t())
    return ways


def int8_products(bench: Bench, facts: Facts) -> list[str]:
    """Multiply int8 in the layouts of both passes: TFLOP/s next to bf16 and fp8, and bits next to exact sums."""
    wrong, device, n = [], bench.device, bench.size(4608, 32)
    for sides in ((3072, 3072), (3072, 12288), (12288, 3072)):
        k, m = (bench.size(side, side // 192) for side in sides)
        for gradient in (False, True):
            rows, columns = (
                torch.randint(-128, 128, sides, device=device).to(torch.int8) for sides in ((n, k), (m, k))
            )
            columns = columns.t().contiguous() if gradient else columns.t()
            scales = torch.rand(n, 1, device=device), torch.rand(1, m, device=device)
            wanted = _scaled(rows.double() @ columns.double(), *scales)
            ways = _ways(rows.bfloat16(), columns.bfloat16(), rows, columns, scales, gradient)
            name = f"{n}x{k}x{m} {'gradient' if gradient else 'forward'}"
            found = facts[name] = {}
            for way, run in ways.items():
                try:
                    y = run()
                except (RuntimeError, ValueError) as error:
                    found[way] = f"does not run: {str(error).splitlines()[0]}"
                    continue
                found[way] = round(2 * n * k * m / bench.seconds(run, 20) / 1e12, 1)
                if way not in ("bf16", "fp8") and not torch.equal(y, wanted):
                    wrong.append(f"{name}: {way} has other bits")
    facts["triton"] = used = product_available(device)
    if bench.cuda and torch.cuda.get_device_capability(device) >= (8, 0) and not used:
        wrong.append("retouch does not use Triton here")
    return wrong


def kernels(bench: Bench, facts: Facts) -> list[str]:
    """Compare the fused kernels with PyTorch's operators: for all byte values, and rounded rows with the CPU's."""
    device = bench.device
    count = torch.arange(200_000, device=device)
    scale = torch.linspace(1e-4, 3, 200, device=device)[:, None]
    wrong = []
    for kind in (E4M3, torch.int8):
        weight = (count % 251 + count // 251).to(torch.uint8).view(200, 1000).view(kind)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found, wanted = scaled_rows(weight, scale, dtype), weight.to(dtype).mul_(scale)
            if not torch.equal(found.nan_to_num(), wanted.nan_to_num()):
                wrong.append(f"{kind} times scales is another {dtype}")
        if not torch.equal(transposed(weight).view(torch.uint8), weight.view(torch.uint8).t()):
            wrong.append(f"another transpose of {kind}")
    x = torch.randn(64, 5000) * torch.logspace(-3, 3, 64)[:, None]
    x[0], factors = 0, torch.rand(1, 5000)
    for kind, factor in itertools.product((E4M3, torch.int8), (None, factors)):
        there = round_rows(x.bfloat16().to(device), kind, None if factor is None else factor.to(device))
        here = round_rows(x.bfloat16(), kind, factor)
        if not all(torch.equal(one.cpu().float(), other.float()) for one, other in zip(there, here, strict=True)):
            wrong.append(f"rows rounded to {kind}{'' if factor is None else ' times factors'} differ from the CPU's")
    facts["differences"] = len(wrong)
    return wrong
