"""The formats of quantized linear layers, and quantizing a frozen model one layer at a time."""

import ctypes
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from foundation.errors import UserError
from foundation.files import reason
from lightning_modules.blocks import without_autocast
from lightning_modules.quantization.eight_bit import FP8, INT8, quantize_rotated
from lightning_modules.quantization.four_bit import FP4, NF4

# safetensors' names of unquantized dtypes.
PLAIN = ("F64", "F32", "BF16", "F16")
QUANTIZATIONS = {"fp8": FP8, "fp4": FP4, "nf4": NF4, "int8_w8a8": INT8}
# Tensors that say how a file is quantized.
MARKERS = [row.marker for row in QUANTIZATIONS.values() if row.marker]


def return_freed_memory() -> None:
    """Return freed memory to the system.

    glibc keeps freed pieces below a threshold that rises to 32 MB. While a large model is quantized layer by layer they
    would add up to its unquantized size.
    """
    with suppress(OSError, TypeError, AttributeError):  # other C libraries return memory by themselves
        ctypes.CDLL(None).malloc_trim(0)


@dataclass
class Quantization:
    """Settings by which a frozen model is quantized. Checkpoints that are quantized on disk are loaded as they are."""

    format: str  # a key of `QUANTIZATIONS`
    modules_to_not_convert: Collection[str]  # full names of linear layers that are not quantized; * matches anything
    components_to_quantize: Collection[str]  # of the pipeline: `transformer`, text encoders
    rotation: bool  # whether inputs are rotated before they are rounded

    def __post_init__(self) -> None:
        if self.format not in QUANTIZATIONS:
            raise UserError(f"model.quantization.format={self.format}: choose {', '.join(QUANTIZATIONS)}")
        if self.rotation and self.format != "int8_w8a8":
            raise UserError(
                f"model.quantization.rotation=true: only int8_w8a8 rotates, {self.format} does not. Set it to false."
            )

    @property
    def source_dtypes(self) -> set[str]:
        """safetensors' names of the dtypes that it quantizes: unquantized ones, and to 4 bits also 8-bit ones."""
        four_bit = QUANTIZATIONS[self.format].is_four_bit
        eight_bit = [dtype for row in QUANTIZATIONS.values() if not row.is_four_bit for dtype in row.dtypes]
        return {*PLAIN, *(eight_bit if four_bit else ())}

    def converts(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is a linear layer to quantize."""
        plain = type(module) is nn.Linear
        return plain and not any(fnmatchcase(name, pattern) for pattern in self.modules_to_not_convert)

    def check(self, model: nn.Module) -> None:
        """Raise a UserError if no layer of a model would be quantized."""
        if not any(self.converts(name, module) for name, module in model.named_modules()):
            raise UserError("model.quantization.modules_to_not_convert leaves no linear layer to quantize")

    def quantize(self, linear: nn.Linear) -> nn.Module:
        """Return the quantized layer, on the same device; raise a UserError if the device or library cannot do it."""
        device = linear.weight.device
        try:
            with without_autocast(device):  # which cannot concatenate float8
                quantize = quantize_rotated if self.rotation else QUANTIZATIONS[self.format].quantize
                return quantize(linear.requires_grad_(False))
        except (RuntimeError, ImportError, AssertionError, TypeError, ValueError, OSError) as error:
            raise UserError(
                f"model.quantization: {self.format} does not run on {device} here: {reason(error)}"
            ) from error

    def nbytes(self, model: nn.Module, dtype: torch.dtype) -> int:
        """Return the bytes of a quantized model's weights; the model may be on the meta device.

        Args:
            dtype: the dtype of unquantized weights.
        """
        quantized = sum(m.weight.numel() for name, m in model.named_modules() if self.converts(name, m))
        others = sum(parameter.numel() for parameter in model.parameters()) - quantized
        return round(quantized * QUANTIZATIONS[self.format].bits / 8) + others * dtype.itemsize
