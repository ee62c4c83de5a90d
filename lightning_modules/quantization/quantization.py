"""The formats of quantized linear layers, and quantizing a frozen model one layer at a time."""

import ctypes
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from foundation.errors import UserError
from foundation.files import reason
from lightning_modules.blocks import without_autocast
from lightning_modules.quantization.eight_bit import FP8, GROUPS, INT8, quantize_int8
from lightning_modules.quantization.four_bit import FP4, NF4

# safetensors' names of unquantized dtypes.
PLAIN = ("F64", "F32", "BF16", "F16")
FORMATS = {"fp8": FP8, "fp4": FP4, "nf4": NF4, "int8_w8a8": INT8}
# Tensors that say how a file is quantized.
MARKERS = [row.marker for row in FORMATS.values() if row.marker]


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

    format: str  # a key of `FORMATS`
    modules_to_not_convert: Collection[str]  # full names of linear layers that are not quantized; * matches anything
    components_to_quantize: Collection[str]  # of the pipeline: `transformer`, text encoders
    rotation: bool  # whether inputs are rotated before they are rounded

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"model.quantization.format={self.format}: choose {', '.join(FORMATS)}")
        if self.rotation and self.format != "int8_w8a8":
            raise UserError(
                f"model.quantization.rotation=true: only int8_w8a8 rotates, {self.format} does not. Set it to false."
            )

    @property
    def source_dtypes(self) -> set[str]:
        """safetensors' names of the dtypes that it quantizes: unquantized ones, and for 4 bits those of 8 bits."""
        four_bit = FORMATS[self.format].is_four_bit
        eight_bit = [dtype for row in FORMATS.values() if not row.is_four_bit for dtype in row.dtypes]
        return {*PLAIN, *(eight_bit if four_bit else ())}

    def settings(self) -> dict[str, Any]:
        """Return everything that the quantized weights depend on."""
        settings = asdict(self) | {"modules_to_not_convert": list(self.modules_to_not_convert)}
        return {key: value for key, value in settings.items() if key != "components_to_quantize"}

    def converts(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is a linear layer to quantize."""
        plain = type(module) is nn.Linear
        return plain and not any(fnmatchcase(name, pattern) for pattern in self.modules_to_not_convert)

    def chosen(self, model: nn.Module) -> list[str]:
        """Return the names of the layers to quantize; raise a UserError if there are none."""
        names = [name for name, module in model.named_modules() if self.converts(name, module)]
        if not names:
            raise UserError("model.quantization.modules_to_not_convert leaves no linear layer to quantize")
        return names

    def quantize(self, linear: nn.Linear) -> nn.Module:
        """Return the quantized layer, on the same device; raise a UserError if the device or library cannot do it."""
        device = linear.weight.device
        try:
            with without_autocast(device):  # which cannot concatenate float8
                quantize = partial(quantize_int8, groups=GROUPS) if self.rotation else FORMATS[self.format].quantize
                return quantize(linear.requires_grad_(False))
        except (RuntimeError, ImportError, AssertionError, TypeError, ValueError, OSError) as error:
            raise UserError(
                f"model.quantization: {self.format} does not run on {device} here: {reason(error)}"
            ) from error

    def nbytes(self, model: nn.Module, dtype: torch.dtype) -> int:
        """Return the bytes of a quantized model's weights; the model may be on the meta device.

        Args:
            dtype: of unquantized weights.
        """
        quantized = sum(m.weight.numel() for name, m in model.named_modules() if self.converts(name, m))
        others = sum(parameter.numel() for parameter in model.parameters()) - quantized
        return round(quantized * FORMATS[self.format].bits / 8) + others * dtype.itemsize
