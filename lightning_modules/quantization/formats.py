"""The formats that linear layers can be quantized in, a row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_modules.quantization import four_bit, fp8, int8
from lightning_modules.quantization.four_bit import FourBitLinear
from lightning_modules.quantization.fp8 import Fp8Linear
from lightning_modules.quantization.int8 import Int8Linear
from lightning_modules.quantization.quanto import QuantoLinear
from lightning_modules.quantization.stored import SCALED, SCALES, OnDisk

# A layer, whether its scales are quantized too, and the dtype of gradients on tensor cores -> the quantized layer.
Quantize = Callable[[nn.Linear, bool, torch.dtype], nn.Module]


@dataclass(frozen=True)
class Format:
    """One way to quantize linear layers.

    Attributes:
        bits: that a weight takes.
        bits_with_scales: the same with its share of the scales, but for those of whole rows.
        backends: what makes a layer, by the name of whose it is; the default first.
        on_disk: its layout in safetensors files; None where there is none.
        bits_double_quant: as bits_with_scales, with double quantization.
    """

    bits: int
    bits_with_scales: float
    backends: Mapping[str, Quantize]
    on_disk: OnDisk | None = None
    bits_double_quant: float | None = None

    @property
    def four_bit(self) -> bool:
        """Whether training on it wants smaller steps."""
        return self.bits == 4


def _four_bit(quant_type: str) -> Format:
    return Format(
        4,
        4.5,
        {"bitsandbytes": lambda linear, double_quant, _: FourBitLinear.quantize(linear, quant_type, double_quant)},
        OnDisk(
            "bitsandbytes",
            ["U8"],
            four_bit.COMPANIONS,
            four_bit.STATES,
            four_bit.read,
            f"{four_bit.QUANT_STATE}{quant_type}",
        ),
        bits_double_quant=4.127,
    )


FORMATS: dict[str, Format] = {
    "fp8": Format(
        8,
        8.0,
        {
            "retouch": lambda linear, _, gradient_dtype: Fp8Linear.quantize(linear, gradient_dtype),
            "quanto": lambda linear, *_: QuantoLinear.quantize(linear, "fp8"),
        },
        OnDisk("retouch", fp8.FLOAT8, SCALED, SCALES, fp8.read, marker="scaled_fp8"),
    ),
    "fp4": _four_bit("fp4"),
    "nf4": _four_bit("nf4"),
    "int8": Format(
        8,
        8.0,
        {
            "bitsandbytes": lambda linear, *_: Int8Linear.quantize(linear),
            "quanto": lambda linear, *_: QuantoLinear.quantize(linear, "int8"),
        },
        OnDisk("bitsandbytes", ["I8"], f"SCB|weight_format|{SCALED}", ("SCB", *SCALES), int8.read),
    ),
}
