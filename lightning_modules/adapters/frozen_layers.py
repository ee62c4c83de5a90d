"""The frozen linear layers that adapters stand beside: their weights, plain or quantized."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.quantization.linear import QuantizedLinear


def dequantized(layer: Any) -> Tensor:
    """The weight (out, in) in float32."""
    if isinstance(layer, QuantizedLinear):
        return layer.dequantize(torch.float32)
    return _plain(layer).float()


def weight_product(layer: Any, rows: Tensor) -> Tensor:
    """(r, in) -> rows W^T (r, out), without the bias, and with no product that rounds more than weights do."""
    if isinstance(layer, QuantizedLinear):
        return layer.exact_product(rows.to(layer.compute_dtype))
    weight = _plain(layer)
    return torch.mm(rows.to(weight.dtype), weight.t())


def _plain(layer: Any) -> Tensor:
    """As it is, where it is no quantized layer of ours."""
    if type(layer.weight) is nn.Parameter:  # torch.compile does not follow peft's questions
        return layer.weight.detach()
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(layer).detach()
