"""int8 by bitsandbytes (arXiv 2208.07339), fp8 and int8 by optimum-quanto: 8 bits a weight and a scale for each row.

Products run in the dtype of the activations.
"""

from collections.abc import Mapping, Sequence

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from lightning_modules.quantization.linear import (
    STORAGES,
    QuantizedLinear,
    Storage,
    in_pieces,
    scaled_rows,
    stored_scale,
)


class Int8(Storage):
    """An int8 weight and the largest magnitude of each row (out,)."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, maxima = parts
        return scaled_rows(weight, (maxima / 127)[:, None], dtype)


STORAGES["int8"] = Int8


def quantize_int8(linear: nn.Linear) -> QuantizedLinear:
    """Quantize with bitsandbytes' kernel for the weight's device."""

    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        weight, maxima, _ = bnb.functional.int8_vectorwise_quant(rows.to(torch.float16))
        return weight, maxima

    weight, maxima = in_pieces(quantize, linear.weight.data)
    return QuantizedLinear("int8", weight.shape, linear.weight.dtype, linear.bias, weight=weight, SCB=maxima)


def quantize_quanto(linear: nn.Linear, format: str) -> QuantizedLinear:
    """Quantize to `fp8` or `int8` by quanto's rule, in our layer: diffusers' LoRA loader does not know quanto's."""
    from optimum.quanto import absmax_scale, qfloat8, qint8

    kind = qfloat8 if format == "fp8" else qint8

    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = absmax_scale(rows, kind, axis=0)
        return torch.ops.quanto.quantize_symmetric(rows, dtype=kind.dtype, axis=0, scale=scale), scale

    weight, scale = in_pieces(quantize, linear.weight.data)
    return QuantizedLinear("scaled", weight.shape, scale.dtype, linear.bias, weight=weight, weight_scale=scale)


def read_int8(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> QuantizedLinear | None:
    """Build a layer in bitsandbytes' layout or in ComfyUI's int8_tensorwise; a `Read`."""
    weight, bias, scale = parts["weight"], parts.get("bias"), stored_scale(parts, name)
    if weight.dtype != torch.int8:
        return None
    if scale is None:
        return QuantizedLinear("int8", weight.shape, dtype, bias, weight=weight, SCB=parts["SCB"].float())
    return QuantizedLinear("scaled", weight.shape, dtype, bias, weight=weight, weight_scale=scale)
