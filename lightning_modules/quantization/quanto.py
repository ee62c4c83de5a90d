"""fp8 and int8 by optimum-quanto's rules, in a layer of ours."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_modules.quantization.linear import STORAGES, QuantizedLinear, Storage, in_pieces


class Quanto(Storage):
    """float8 or int8 and a scale (out, 1), multiplied in the scale's dtype as optimum-quanto does."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, scale = parts
        return (scale * weight.to(scale.dtype)).to(dtype)


class QuantoLinear(QuantizedLinear):
    """Weights of optimum-quanto in a layer of ours: its own has them under names that diffusers' LoRA loader misses.

    Args:
        weight: (out, in), float8 or int8.
        scale: (out, 1).
    """

    storage = "quanto"

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape, scale.dtype, weight=weight, weight_scale=scale, bias=bias)

    @classmethod
    def quantize(cls, linear: nn.Linear, format: str) -> "QuantoLinear":
        """By quanto's own rule for a format: `fp8` or `int8`."""
        from optimum.quanto import absmax_scale, qfloat8, qint8

        kind = qfloat8 if format == "fp8" else qint8

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            scale = absmax_scale(rows, kind, axis=0)
            return torch.ops.quanto.quantize_symmetric(rows, dtype=kind.dtype, axis=0, scale=scale), scale

        weight, scale = in_pieces(quantize, linear.weight.data)
        return cls(weight, scale, linear.bias)


STORAGES["quanto"] = Quanto
