"""int8: weights in 8 bits with a scale for each row, by bitsandbytes' kernels."""

from collections.abc import Sequence

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from lightning_modules.quantization.fused import scaled_rows
from lightning_modules.quantization.linear import STORAGES, QuantizedLinear, Storage, in_pieces
from lightning_modules.quantization.stored import StoredLayer


class Int8(Storage):
    """int8 and each row's largest magnitude."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, maxima = parts
        return scaled_rows(weight, (maxima / 127)[:, None], dtype)


class Int8Linear(QuantizedLinear):
    """Weights in 8 bits with a scale for each row (arXiv 2208.07339); activations stay in their own dtype.

    Args:
        weight: (out, in), int8.
        maxima: (out,), each row's largest magnitude; `SCB` is bitsandbytes' name on disk.
        dtype: what adapters beside the layer are made in.
    """

    storage = "int8"

    def __init__(self, weight: Tensor, maxima: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.shape, dtype, weight=weight, SCB=maxima, bias=bias)

    @classmethod
    def quantize(cls, linear: nn.Linear) -> "Int8Linear":
        """By bitsandbytes' kernel for the weight's device."""

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            weight, maxima, _ = bnb.functional.int8_vectorwise_quant(rows.to(torch.float16))
            return weight, maxima

        weight, maxima = in_pieces(quantize, linear.weight.data)
        return cls(weight, maxima, linear.bias, linear.weight.dtype)


class ScaledInt8(Storage):
    """int8 and a scale (out, 1), or (1, 1) for all."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, scale = parts
        return scaled_rows(weight, scale, dtype)


STORAGES |= {"int8": Int8, "scaled_int8": ScaledInt8}


def read(stored: StoredLayer) -> QuantizedLinear | None:
    """A layer in bitsandbytes' layout, or with the scales that ComfyUI calls int8_tensorwise."""
    if stored.kind != "I8":
        return None
    weight, bias = stored.read("weight"), stored.bias()
    scale = stored.scale(len(weight))
    if scale is None:
        return Int8Linear(weight, stored.read("SCB").float(), bias, stored.dtype)
    layer = QuantizedLinear(weight.shape, stored.dtype, weight=weight, weight_scale=scale, bias=bias)
    layer.storage = "scaled_int8"  # maxima of rows would round the scales
    return layer
