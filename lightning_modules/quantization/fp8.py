"""fp8: weights in float8 with a scale for each row, multiplied on tensor cores where there are any."""

import logging
from collections.abc import Sequence

import torch
from rich.filesize import decimal
from torch import Tensor, nn

from lightning_modules.quantization.float8 import (
    E4M3,
    E5M2,
    has_tensor_cores,
    kernels,
    quantize_rows,
    row_scale,
    scaled_product,
    to_float8,
)
from lightning_modules.quantization.fused import scaled_rows, transposed
from lightning_modules.quantization.linear import STORAGES, QuantizedLinear, Storage, in_pieces
from lightning_modules.quantization.stored import StoredLayer

log = logging.getLogger("retouch")

# Tensor cores take matrices whose sides are multiples of it.
TILE = 16
# safetensors' names of the dtypes.
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class Float8(Storage):
    """A float8 weight and its scale (out, 1), or (1, 1) for all, multiplied on fp8 tensor cores where there are any.

    Args:
        gradient_dtype: float8_e5m2 quantizes gradients for tensor cores; any other multiplies them in their own dtype.
    """

    def __init__(self, gradient_dtype: str) -> None:
        self.gradient_dtype = getattr(torch, gradient_dtype)

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, scale, *_ = parts
        return scaled_rows(weight, scale, dtype)

    def product(self, x: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        weight, scale, *_ = parts
        out_features, in_features = shape
        if not _on_tensor_cores(x, weight, E4M3):
            return super().product(x, parts, shape)
        rows, row_scales = quantize_rows(x.reshape(-1, in_features), E4M3)
        # Both scaled by rows: the second matrix is weight^T, column by column.
        column_scales = scale.expand(out_features, 1).reshape(1, -1).contiguous()
        y = scaled_product(rows, row_scales, weight.t(), column_scales)
        return y.view(*x.shape[:-1], out_features).to(x.dtype)

    def input_gradient(self, grad: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        weight, scale, *stored = parts
        out_features, in_features = shape
        if self.gradient_dtype != E5M2 or not _on_tensor_cores(grad, weight, E5M2):
            return super().input_gradient(grad, parts, shape)
        # The weight's scales are along the sum: they go into the gradient.
        rows, row_scales = quantize_rows(grad.reshape(-1, out_features) * scale.to(grad.dtype).t(), E5M2)
        ones = torch.ones(1, in_features, device=grad.device)
        # Hopper's tensor cores want the second matrix column by column: a copy of one layer's bytes, or a stored one.
        columns = stored[0] if stored else transposed(weight)
        x = scaled_product(rows, row_scales, columns.t(), ones)
        return x.view(*grad.shape[:-1], in_features).to(grad.dtype)


def _on_tensor_cores(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    whole = weight.shape[0] % TILE == 0 and weight.shape[1] % TILE == 0
    return whole and weight.dtype == E4M3 and has_tensor_cores(x.device, dtype)


class Fp8Linear(QuantizedLinear):
    """Weights in float8 with scales (arXiv 2209.05433).

    Args:
        weight: (out, in), float8.
        scale: (out, 1), or (1, 1) for all; the weight is weight * scale.
        dtype: what adapters beside the layer are made in.
        gradient_dtype: of `Float8`.

    Attributes:
        columns: the weight's transpose (in, out), where it is stored beside the weight; not a part of its state.
    """

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> None:
        super().__init__(weight.shape, dtype, weight=weight, weight_scale=scale, bias=bias)
        self.gradient_dtype = gradient_dtype
        self.columns: Tensor | None = None
        self.storage = f"fp8 {gradient_dtype}".replace("torch.", "")

    @classmethod
    def quantize(cls, linear: nn.Linear, gradient_dtype: torch.dtype) -> "Fp8Linear":
        """Per-row scales that are powers of two: they cost no precision, and multiplying by them is exact."""

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            mantissa, exponent = torch.frexp(row_scale(rows, E4M3))
            scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
            return to_float8(rows, scale, E4M3), scale

        weight, scale = in_pieces(quantize, linear.weight)
        return cls(weight, scale, linear.bias, linear.weight.dtype, gradient_dtype)

    def parts(self) -> list[Tensor]:
        parts = super().parts()
        return parts if self.columns is None else [*parts, self.columns]


def store_transposes(model: nn.Module, free: int) -> None:
    """Keep the transposes that gradients are multiplied by, if there is room for all of them; else each is made anew.

    Args:
        free: bytes.
    """
    layers = [one for one in model.modules() if isinstance(one, Fp8Linear) and one.gradient_dtype == E5M2]
    used = {layer: weight for layer in layers if _on_tensor_cores(weight := layer.parts()[0], weight, E5M2)}
    size = sum(weight.nbytes for weight in used.values())
    if not 0 < size <= free:
        return
    for layer, weight in used.items():
        layer.columns = transposed(weight)
    log.info(f"fp8: {decimal(size)} of free memory hold the weights' transposes, which gradients are multiplied by")


STORAGES["fp8"] = Float8


def read(stored: StoredLayer) -> Fp8Linear | None:
    """A layer in float8, whose scale may be one for all, one for each row, or none."""
    if stored.kind not in FLOAT8:
        return None
    weight = stored.read("weight")
    scale = stored.scale(len(weight))
    scale = torch.ones(1, 1, device=stored.device) if scale is None else scale
    return Fp8Linear(weight, scale, stored.bias(), stored.dtype, stored.gradient_dtype)


def log_kernels(model: nn.Module, device: torch.device) -> None:
    """Log what multiplies a model's layers in fp8, if it has any: tensor cores that stay idle are seen by nothing else.

    Args:
        device: that it computes on.
    """
    for layer in model.modules():
        if isinstance(layer, Fp8Linear):
            log.info(f"fp8: {kernels(device, layer.gradient_dtype)}")
            return
