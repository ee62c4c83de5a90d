"""Triton's kernels without a GPU: results by its interpreter, and compilation for GPUs."""

import pytest

from tests.support.combinations import first
from tests.support.commands import ROOT, run_code

triton = pytest.importorskip("triton")


@pytest.mark.slow
def test_results_are_pytorchs_to_the_bit():
    """All byte values are tested, at sizes that no tile divides."""
    code = (
        "import torch\n"
        "from lightning_modules.quantization.triton_kernels import scale_rows, transpose\n"
        "count, scale = torch.arange(200_000), torch.linspace(1e-4, 3, 200)[:, None]\n"
        "for kind in (torch.float8_e4m3fn, torch.int8):\n"
        "    weight = (count % 251 + count // 251).to(torch.uint8).view(200, 1000).view(kind)\n"
        "    for dtype in (torch.bfloat16, torch.float16, torch.float32):\n"
        "        found, wanted = scale_rows(weight, scale, dtype), weight.to(dtype).mul_(scale)\n"
        "        assert torch.equal(found.isnan(), wanted.isnan())\n"
        "        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())\n"
        "    assert torch.equal(transpose(weight).view(torch.uint8), weight.view(torch.uint8).t())\n"
        "print('done')\n"
    )
    assert run_code(code, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT)).stdout == "done\n"


@pytest.mark.parametrize("capability", first(1, [90, 75, 80, 120]))
def test_kernels_compile_for_gpus(capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_modules.quantization.triton_kernels import scale_rows_kernel, transpose_kernel

    scaling = {"weight": "*u8", "scale": "*fp32", "out": "*bf16", "rows": "i32", "columns": "i32"}
    target = GPUTarget("cuda", capability, 32)
    for kernel, pointers, values in (
        (scale_rows_kernel, scaling, {"is_int8": 0, "tile": 64}),
        (scale_rows_kernel, scaling, {"is_int8": 1, "tile": 64}),
        (transpose_kernel, {"weight": "*u8", "out": "*u8", "rows": "i32", "columns": "i32"}, {"tile": 64}),
    ):
        signature = {**pointers, **dict.fromkeys(values, "constexpr")}
        assert triton.compile(ASTSource(kernel, signature, values), target=target).asm["cubin"]
