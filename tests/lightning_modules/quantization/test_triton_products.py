"""Triton kernels: bits by its interpreter, instructions and shared memory by its compiler, without a GPU."""

import itertools
import re

import pytest
import torch

from lightning_modules.quantization import eight_bit, triton_products
from lightning_modules.quantization.eight_bit import E4M3, LARGEST_VALUES
from lightning_modules.quantization.triton_products import (
    TILES,
    available,
    int8_product,
    product_available,
    rounded_rows,
    transposed_bytes,
)
from tests.support.commands import run_code
from tests.support.quantized import quantization

# Bytes of shared memory for a block, by compute capability.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


def reference(rows, row_scales, columns, column_scales, bias, dtype):
    y = (rows.int() @ columns.int()).float() * row_scales
    y = y if column_scales is None else y * column_scales
    y = y if bias is None else y + bias
    if dtype == torch.bfloat16:  # the interpreter cuts bf16 off; the compiler's rounding is in its instruction
        y = (y.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return y.to(dtype)


def operands(n, k, m, transposed):
    """Return random operands whose first rows and columns hold extreme values only."""
    rows, weight = (torch.randint(-128, 128, (size, k), dtype=torch.int8) for size in (n, m))
    for matrix in (rows, weight):
        matrix[0], matrix[1, ::2], matrix[1, 1::2] = -128, 127, -128
    row_scales, column_scales = torch.rand(n, 1) * 1e-4, torch.rand(1, m) * 1e-2
    return rows, row_scales, weight.t() if transposed else weight.t().contiguous(), column_scales


def compare():
    torch.manual_seed(0)
    for tile, transposed in itertools.product(TILES, (True, False)):
        triton_products.TILES = (tile,)  # without a choice nothing is timed
        triton_products.kernel.cache_clear()
        large, long = ((131, 197, 261), (1, 1024, 16)) if tile != TILES[-1] else ((1200, 40, 30), (5, 12288, 3))
        cases = (large, torch.bfloat16, True), (long, torch.float16, True), (long, torch.float32, False)
        for (n, k, m), dtype, scaled in cases:
            *given, column_scales = operands(max(n, 2), k, m, transposed)
            more = (column_scales, torch.randn(m).bfloat16()) if scaled else (None, None)
            found, wanted = (product(*given, *more, dtype) for product in (int8_product, reference))
            assert torch.equal(found, wanted), (tile, transposed, n, k, m, dtype, scaled)


@pytest.mark.slow
def test_products_have_the_bits_of_the_reference_and_importing_them_needs_no_triton():
    first = f"import sys; from {triton_products.__name__} import int8_product; assert 'triton' not in sys.modules; "
    run_code(f"{first}from {__name__} import compare; compare()", TRITON_INTERPRET="1")


def tune():
    """Choose tiles, timed with the interpreter, for several numbers of rows."""
    for rows, choices in ((8, 1), (5, 1), (64, 1), (65, 2), (100, 2), (3, 2)):
        given = operands(rows, 40, 16, transposed=True)
        assert torch.equal(int8_product(*given, None, torch.float32), reference(*given, None, torch.float32))
        assert len(triton_products.kernel().cache) == choices
    eight_bit.product_available = lambda device: True
    found = eight_bit.Int8().multiply(given[:2], given[2:], None, torch.float16)
    wanted = int8_product(*given, None, torch.float16)
    assert torch.equal(found, wanted)
    assert len(triton_products.kernel().cache) == choices + 1


@pytest.mark.slow
def test_layers_use_it_and_tiles_are_chosen_once_for_all_sizes_up_to_a_power_of_two():
    run_code(f"from {__name__} import tune; tune()", TRITON_INTERPRET="1")


def same(found, wanted):
    """Compare scales, and the rows whose scale is finite: of others the product is not finite, whatever they hold."""
    (rows, scales), (wanted_rows, wanted_scales) = found, wanted
    finite = wanted_scales.isfinite().flatten()
    assert torch.equal(scales.nan_to_num(-1), wanted_scales.nan_to_num(-1))
    assert torch.equal(rows[finite].float(), wanted_rows[finite].float())


def compare_rounding():
    """Compare rows of zeros, infinity, NaN and tiny values, of several lengths; and values around each tie."""
    torch.manual_seed(0)
    sizes = (1, torch.float32), (1024, torch.float16), (2500, torch.bfloat16)
    for dtype, (k, given) in itertools.product((torch.int8, E4M3), sizes):
        x = (torch.randn(7, k + 3) * torch.logspace(-3, 3, 7)[:, None]).to(given)[:, :k]
        x[0], x[1, k // 2], x[2, 0], x[3] = 0, float("inf"), float("nan"), 1e-30
        for factors in (None, torch.rand(1, 1), torch.rand(1, k)):
            same(rounded_rows(x, dtype, factors, LARGEST_VALUES[dtype]), eight_bit._round_rows(x, dtype, factors))
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    near = [ties.nextafter(values[1:]), ties.nextafter(values[:-1]), ties * (1 + 2**-12), ties * (1 - 2**-12)]
    x = torch.cat([values, ties, *near])[None]  # scaled by 1
    same(rounded_rows(x, E4M3, None, LARGEST_VALUES[E4M3]), eight_bit._round_rows(x, E4M3, None))
    x = torch.randint(256, (300, 130), dtype=torch.uint8)
    assert torch.equal(transposed_bytes(x), x.t())


def compare_layers():
    """Compare a layer's products and gradients with those of PyTorch's formula."""
    torch.manual_seed(0)
    for format, dtype in (("fp8", E4M3), ("int8_w8a8", torch.int8)):
        layer, found = quantization(format).quantize(torch.nn.Linear(96, 48)), []
        grads = torch.randn(2, 32, 48)[:, :, ::2].repeat_interleave(2, -1)
        for used in (False, True):
            eight_bit.has_tensor_cores, eight_bit.available = lambda _: True, lambda _, used=used: used
            x = torch.linspace(-3, 5, 2 * 32 * 96).view(2, 32, 96).requires_grad_()
            y = layer(x)
            y.backward(grads)
            found.append((y.detach(), x.grad))
        assert all(map(torch.equal, *found)), dtype


@pytest.mark.slow
@pytest.mark.parametrize("compare", [compare_rounding, compare_layers])
def test_rows_are_rounded_by_the_formula(compare):
    run_code(f"from {__name__} import {compare.__name__} as compare; compare()", TRITON_INTERPRET="1")


def compiled(capability, tile, transposed):
    """Compile the kernel as for a layer of a transformer, with bf16 output."""
    pointers = {"rows": "*i8", "columns": "*i8", "bias": "*bf16", "output": "*bf16"}
    pointers |= {"row_scales": "*fp32", "column_scales": "*fp32"}
    *sizes, warps, stages = tile
    names = "tile_rows", "tile_columns", "tile_inner", "scaled", "biased", "stride_k" if transposed else "stride_m"
    constants = dict(zip(names, (*sizes, True, True, 1), strict=True))
    options = {"num_warps": warps, "num_stages": stages}
    return build(capability, triton_products.kernel().fn, pointers, constants, ("n", "bucket"), options)


def build(capability, function, kinds, constants, odd=(), options=None):
    """Compile a kernel; parameters are divisible by 16 except `odd` ones."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: kinds.get(name, "i32") for name in function.arg_names} | dict.fromkeys(constants, "constexpr")
    divisible = [i for i, name in enumerate(function.arg_names) if name not in (*constants, *odd)]
    source = ASTSource(function, signature, constants, {(i,): [["tt.divisibility", 16]] for i in divisible})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options or {})


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_cubins_multiply_int8_on_tensor_cores_within_shared_memory(capability):
    for tile, transposed in (*((tile, True) for tile in TILES), (TILES[0], False)):
        kernel = compiled(capability, tile, transposed)
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED[capability], (tile, kernel.metadata.shared)
        ptx = kernel.asm["ptx"]
        assert re.search(r"mma\S*\.s32\.s8\.s8", ptx)
        assert "cvt.rn.bf16" in ptx
        assert ".ftz" not in ptx
        # Bytes are permuted only to transpose: not by prefetching, which would spill registers.
        assert ("prmt" in ptx) == (not transposed)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [75, *SHARED])
def test_cubins_round_and_transpose_in_wide_words(capability):
    """Read and write at least 8 bytes a thread at once; divide and cast as PyTorch does."""
    kinds = [("i8", 127.0, None), ("fp8e4nv", 448.0, E4M3)]
    for name, largest, dtype in kinds if capability >= 89 else kinds[:1]:
        limits = dtype and torch.finfo(dtype)
        for step in (None, 0, 1):
            constants = {"largest": largest, "normal": limits and limits.tiny, "eps": limits and limits.eps}
            pointers = {"x": "*bf16", "factors": "*fp32", "output": f"*{name}", "scales": "*fp32", "tiny": "fp32"}
            constants |= {"step": step, "block": 1024}
            kernel = build(capability, triton_products.rounding_kernel(), pointers, constants, ("tiny",))
            ptx = kernel.asm["ptx"]
            assert kernel.asm["cubin"]
            assert "ld.global.v4.b32" in ptx
            assert "st.global.v2.b32" in ptx
            assert "div.rn.f32" in ptx
            assert ".ftz" not in ptx
            assert dtype is None or "cvt.rn.satfinite.e4m3x2" in ptx
    kernel = build(capability, triton_products.transposing_kernel(), {"x": "*u8", "output": "*u8"}, {"tile": 128})
    assert kernel.asm["cubin"]
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= {*re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"])}


@pytest.mark.slow
def test_triton_compiles_no_int8_product_for_the_20_series():
    """Show why `product_available` starts at 8.0: Triton has no such product below, where torch._int_mm runs."""
    with pytest.raises(RuntimeError, match="PassManager"):
        compiled(75, TILES[-1], transposed=True)


def test_a_cpu_has_no_triton_products():
    assert not available(torch.device("cpu"))
    assert not product_available(torch.device("cpu"))
