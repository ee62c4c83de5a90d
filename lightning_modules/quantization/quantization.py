"""The formats of quantized linear layers, and quantizing a frozen model one layer at a time."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from datamodules.errors import UserError
from datamodules.files import reason
from lightning_modules.execution.blocks import without_autocast
from lightning_modules.execution.host_memory import return_freed_memory
from lightning_modules.quantization import four_bit, fp8
from lightning_modules.quantization.eight_bit import quantize_int8, quantize_quanto, read_int8
from lightning_modules.quantization.linear import SCALED, SCALES, Layout

LIBRARIES = {"quanto": "optimum-quanto", "bitsandbytes": "bitsandbytes"}
# Bits of a weight in 4 bits with double quantization.
DOUBLE_QUANT_BITS = 4.127
# Quantizes a layer; the flag is double quantization.
Quantize = Callable[[nn.Linear, bool], nn.Module]


@dataclass(frozen=True)
class QuantizationFormat:
    """A way to store the weights of linear layers.

    Attributes:
        bits: of a weight, with its share of a block's scales but not of a row's.
        backends: functions that quantize a layer, by backend; the default first.
        layout: in safetensors files.
    """

    bits: float
    backends: Mapping[str, Quantize]
    layout: Layout

    @property
    def is_four_bit(self) -> bool:
        return self.bits < 5


def _four_bit(quant_type: str) -> QuantizationFormat:
    sign = f"{four_bit.QUANT_STATE}{quant_type}"
    return QuantizationFormat(
        4.5,
        {"bitsandbytes": lambda linear, double_quant: four_bit.quantize_four_bit(linear, quant_type, double_quant)},
        Layout("bitsandbytes", ["U8"], four_bit.COMPANIONS, four_bit.STATES, four_bit.read_four_bit, sign),
    )


FORMATS: dict[str, QuantizationFormat] = {
    "fp8": QuantizationFormat(
        8,
        {
            "retouch": lambda linear, _: fp8.quantize_fp8(linear),
            "quanto": lambda linear, _: quantize_quanto(linear, "fp8"),
        },
        Layout("retouch", fp8.FLOAT8, SCALED, SCALES, fp8.read_fp8, marker="scaled_fp8"),
    ),
    "fp4": _four_bit("fp4"),
    "nf4": _four_bit("nf4"),
    "int8": QuantizationFormat(
        8,
        {
            "bitsandbytes": lambda linear, _: quantize_int8(linear),
            "quanto": lambda linear, _: quantize_quanto(linear, "int8"),
        },
        Layout("bitsandbytes", ["I8"], f"SCB|weight_format|{SCALED}", ("SCB", *SCALES), read_int8),
    ),
}


def nbytes(module: nn.Module) -> int:
    """Return the bytes of a model's weights, quantized or not; with trainer=fsdp, of this process's shards."""
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in module.state_dict().values())


class Quantization:
    """Settings by which a frozen model is quantized. Checkpoints that are quantized on disk are loaded as they are.

    Args:
        format: a key of `FORMATS`.
        backend: `retouch` or `quanto` for fp8, `bitsandbytes` or `quanto` for int8, `bitsandbytes` for 4 bits; None for
            the first of these.
        modules_to_not_convert: full names of linear layers that are not quantized; * matches anything.
        components_to_quantize: components of the pipeline: `transformer`, text encoders.
        bnb_4bit_use_double_quant: quantize the scales of 4-bit blocks too: 4.1 bits a weight instead of 4.5.

    Raises:
        UserError: the format or backend does not exist.
    """

    def __init__(
        self,
        format: str,
        backend: str | None,
        modules_to_not_convert: Collection[str],
        components_to_quantize: Collection[str],
        bnb_4bit_use_double_quant: bool,
    ) -> None:
        if format not in FORMATS:
            raise UserError(f"model.quantization.format={format}: choose {', '.join(FORMATS)}")
        backends = list(FORMATS[format].backends)
        if backend not in (None, *backends):
            raise UserError(f"model.quantization.backend={backend} has no {format}: choose {' or '.join(backends)}")
        self.format = format
        self.backend = backend or backends[0]
        self.modules_to_not_convert = tuple(modules_to_not_convert)
        self.components_to_quantize = tuple(components_to_quantize)
        self.double_quant = bnb_4bit_use_double_quant

    def __str__(self) -> str:
        return f"{self.format} by {self.backend}"

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of a block's scales but not of a row's."""
        row = FORMATS[self.format]
        return DOUBLE_QUANT_BITS if self.double_quant and row.is_four_bit else row.bits

    def settings(self) -> dict[str, Any]:
        """Return everything that the quantized weights depend on."""
        return {
            "format": self.format,
            "backend": self.backend,
            "version": version(LIBRARIES[self.backend]) if self.backend in LIBRARIES else None,
            "modules_to_not_convert": list(self.modules_to_not_convert),
            "bnb_4bit_use_double_quant": self.double_quant,
        }

    def require_layout(self, task: str) -> None:
        """Raise a UserError if this backend's layers have no layout on disk."""
        if FORMATS[self.format].layout.backend != self.backend:
            raise UserError(f"{task} cannot write {self.backend}'s layers: leave model.quantization.backend out")

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
                return FORMATS[self.format].backends[self.backend](linear.requires_grad_(False), self.double_quant)
        except (RuntimeError, ImportError, AssertionError, TypeError, ValueError, OSError) as error:
            raise UserError(f"model.quantization: {self} does not run on {device} here: {reason(error)}") from error

    def convert(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Quantize a loaded model in place, layer by layer, and move it to `device`.

        Args:
            dtype: of unquantized weights, and of layers before they are quantized.

        Raises:
            UserError: no layer is chosen, or an adapter is already injected: it must see the quantized layers.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise UserError("quantize before the adapter is injected: it is attached to quantized layers")
        chosen = self.chosen(model)
        for name in chosen:
            linear = model.get_submodule(name).to(device, dtype)
            assert isinstance(linear, nn.Linear)
            model.set_submodule(name, self.quantize(linear))
            del linear
            return_freed_memory()
        quantized = {parameter for name in chosen for parameter in model.get_submodule(name).parameters()}
        for parameter in model.parameters():
            if parameter not in quantized:
                parameter.data = parameter.data.to(device, dtype)
        model.to(device)  # buffers, in their own dtype
        return_freed_memory()

    def nbytes(self, model: nn.Module, dtype: torch.dtype) -> int:
        """Return the bytes of a quantized model's weights; the model may be on the meta device.

        Args:
            dtype: of unquantized weights.
        """
        quantized = sum(m.weight.numel() for name, m in model.named_modules() if self.converts(name, m))
        others = sum(parameter.numel() for parameter in model.parameters()) - quantized
        return round(quantized * self.bits / 8) + others * dtype.itemsize
