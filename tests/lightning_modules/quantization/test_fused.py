"""Triton's kernels, without a GPU: their results by its interpreter, and that it compiles them for GPUs."""

import pytest

from tests.support.combinations import first
from tests.support.commands import ROOT, run_code

triton = pytest.importorskip("triton")


@pytest.mark.slow
def test_results_are_pytorchs_to_the_bit():
    """Of all bytes, at sides that no tile divides; and a kernel that rounds otherwise is found out."""
    code = (
        "import torch\n"
        "from lightning_modules.quantization import fused\n"
        "print(fused.disagreements(torch.device('cpu')))\n"
        "scale_rows = fused._scale_rows\n"
        "fused._scale_rows = lambda weight, scale, dtype: scale_rows(weight, scale * (1 + 1e-7), dtype)\n"
        "print(fused.disagreements(torch.device('cpu')))\n"
    )
    done = run_code(code, TRITON_INTERPRET="1", PYTHONPATH=str(ROOT))
    right, wrong = done.stdout.splitlines()
    assert right == "[]"
    assert wrong.count("times scales is another torch.float32") == 2


@pytest.mark.parametrize("capability", first(1, [90, 75, 80, 120]))
def test_kernels_compile_for_gpus(capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_modules.quantization.triton_kernels import scale_rows, transpose

    scaling = {"weight": "*u8", "scale": "*fp32", "out": "*bf16", "rows": "i32", "columns": "i32"}
    target = GPUTarget("cuda", capability, 32)
    for kernel, pointers, values in (
        (scale_rows, scaling, {"is_int8": 0, "tile": 64}),
        (scale_rows, scaling, {"is_int8": 1, "tile": 64}),
        (transpose, {"weight": "*u8", "out": "*u8", "rows": "i32", "columns": "i32"}, {"tile": 64}),
    ):
        signature = {**pointers, **dict.fromkeys(values, "constexpr")}
        assert triton.compile(ASTSource(kernel, signature, values), target=target).asm["cubin"]
