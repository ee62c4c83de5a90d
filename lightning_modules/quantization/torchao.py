"""fp8 by torchao."""

from torch import nn


def quantize(linear: nn.Linear) -> nn.Module:
    """The layer with its weight in torchao's float8, multiplied in the input's dtype."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    holder = nn.Sequential(linear)
    quantize_(holder, Float8WeightOnlyConfig())
    return holder[0].requires_grad_(False)
