"""Quantizing the frozen linear layers of a model, one at a time."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from datamodules.errors import UserError
from datamodules.files import reason
from lightning_modules.execution.freed_memory import return_freed_memory
from lightning_modules.quantization.formats import FORMATS, Format
from lightning_modules.quantization.stored import OnDisk

LIBRARIES = {"quanto": "optimum-quanto", "bitsandbytes": "bitsandbytes"}
GRADIENT_DTYPES = {"float8_e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16}


def nbytes(module: nn.Module) -> int:
    """What a model's weights take, quantized or not."""
    return sum(_tensor_bytes(tensor) for tensor in module.state_dict().values())


def _tensor_bytes(tensor: Tensor) -> int:
    # With trainer=fsdp, the share of this process.
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return sum(_tensor_bytes(part) for part in parts if isinstance(part, Tensor))
    return tensor.nbytes


class Quantization:
    """How a frozen model is quantized. Checkpoints that are quantized on disk are loaded as they are instead.

    Args:
        format: of weights: `fp8` (e4m3), `fp4`, `nf4` or `int8`.
        backend: whose layers: `retouch` or `quanto` for fp8, `bitsandbytes` or `quanto` for int8,
            `bitsandbytes` for 4 bits; None for the first of these.
        modules_to_not_convert: full names of linear layers that stay as they are; * stands for anything.
        components_to_quantize: which components of the pipeline: `transformer`, text encoders.
        bnb_4bit_use_double_quant: quantize the scales of 4-bit blocks too: 4.1 bits a weight in place of 4.5.
        gradient_dtype: of the gradients that fp8 tensor cores multiply: `float8_e5m2`, or `bfloat16`, slower.
        cache: whether a quantized transformer is kept, for the next start.
        cache_dir: where; None keeps none.

    Raises:
        UserError: the format or its library does not exist.
    """

    def __init__(
        self,
        format: str,
        backend: str | None,
        modules_to_not_convert: Collection[str],
        components_to_quantize: Collection[str],
        bnb_4bit_use_double_quant: bool,
        gradient_dtype: str,
        cache: bool,
        cache_dir: str | None,
    ) -> None:
        if format not in FORMATS:
            raise UserError(f"model.quantization.format={format}: choose {', '.join(FORMATS)}")
        backends = list(FORMATS[format].backends)
        if backend not in (None, *backends):
            raise UserError(f"model.quantization.backend={backend} has no {format}: choose {' or '.join(backends)}")
        if gradient_dtype not in GRADIENT_DTYPES:
            raise UserError(
                f"model.quantization.gradient_dtype={gradient_dtype}: choose {' or '.join(GRADIENT_DTYPES)}"
            )
        self.format = format
        self.backend = backend or backends[0]
        library = LIBRARIES.get(self.backend)
        if library is not None and find_spec(library.partition("-")[0]) is None:
            raise UserError(f"model.quantization.backend={self.backend} is not installed: pip install {library}")
        self.modules_to_not_convert = tuple(modules_to_not_convert)
        self.components_to_quantize = tuple(components_to_quantize)
        self.double_quant = bnb_4bit_use_double_quant
        self.gradient_dtype: torch.dtype = GRADIENT_DTYPES[gradient_dtype]
        self.cache_dir = cache_dir if cache else None

    def settings(self) -> dict[str, Any]:
        """All that the quantized weights depend on."""
        return {
            "format": self.format,
            "backend": self.backend,
            "version": version(LIBRARIES[self.backend]) if self.backend in LIBRARIES else None,
            "modules_to_not_convert": list(self.modules_to_not_convert),
            "bnb_4bit_use_double_quant": self.double_quant,
        }

    def __str__(self) -> str:
        return f"{self.format} by {self.backend}"

    def converts(self, name: str, module: nn.Module) -> bool:
        """Whether this is a linear layer that is to be quantized."""
        plain = type(module) is nn.Linear
        return plain and not any(fnmatchcase(name, pattern) for pattern in self.modules_to_not_convert)

    def chosen(self, model: nn.Module) -> list[str]:
        """The names of the layers that are to be quantized.

        Raises:
            UserError: there are none.
        """
        names = [name for name, module in model.named_modules() if self.converts(name, module)]
        if not names:
            raise UserError("model.quantization.modules_to_not_convert leaves no linear layer to quantize")
        return names

    def quantize(self, linear: nn.Linear) -> nn.Module:
        """A layer in its place, on its device.

        Raises:
            UserError: the device or the installed library cannot do it.
        """
        device = linear.weight.device
        try:
            quantize = self._row.backends[self.backend]
            return quantize(linear.requires_grad_(False), self.double_quant, self.gradient_dtype)
        except (RuntimeError, ImportError, AssertionError, TypeError, ValueError, OSError) as error:
            first = reason(error)
            raise UserError(f"model.quantization: {self} does not run on {device} here: {first}") from error

    def convert(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Quantize a loaded model in place, layer by layer, and move it to `device`.

        Args:
            dtype: of what is not quantized, and of layers before they are.

        Raises:
            UserError: nothing is to be quantized, or an adapter is already there: it must see the quantized layers.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise UserError("quantize before the adapter is injected: it goes beside quantized layers")
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
        """What the weights of a model, which may be on the meta device, will take.

        Args:
            dtype: of what is not quantized.
        """
        quantized = sum(m.weight.numel() for name, m in model.named_modules() if self.converts(name, m))
        others = sum(parameter.numel() for parameter in model.parameters()) - quantized
        return round(quantized * self.bits / 8) + others * dtype.itemsize

    @property
    def bits(self) -> float:
        """What a weight takes, scales included but for those of whole rows."""
        double_quant = self._row.bits_double_quant if self.double_quant else None
        return double_quant or self._row.bits_with_scales

    @property
    def is_kept(self) -> bool:
        """Whether a transformer that it quantizes is kept."""
        return self.cache_dir is not None and self.on_disk is not None

    @property
    def on_disk(self) -> OnDisk | None:
        """The layout that its layers are written in; None where this backend's have none."""
        layout = self._row.on_disk
        return layout if layout is not None and layout.backend == self.backend else None

    @property
    def _row(self) -> Format:
        return FORMATS[self.format]
