"""How quantized layers stand in safetensors files."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from datamodules.errors import UserError, listing

if TYPE_CHECKING:
    from lightning_modules.quantization.linear import QuantizedLinear


class StoredLayer:
    """A linear layer's tensors on disk.

    Args:
        name: of the layer.
        dtypes: safetensors' names of the dtypes of all tensors in the files, by name.
        read: gives the tensor of a name.
        device: that the layer goes to.
        dtype: of what is not quantized.
        gradient_dtype: of `Quantization`.
    """

    def __init__(
        self,
        name: str,
        dtypes: Mapping[str, str],
        read: Callable[[str], Tensor],
        device: torch.device,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.dtypes = dtypes
        self._read = read
        self.device = device
        self.dtype = dtype
        self.gradient_dtype = gradient_dtype

    @property
    def kind(self) -> str:
        """The dtype of its weight, as safetensors names it."""
        return self.dtypes[f"{self.name}.weight"]

    def has(self, part: str) -> bool:
        """Whether there is such a tensor of the layer."""
        return f"{self.name}.{part}" in self.dtypes

    def read(self, part: str) -> Tensor:
        """One of its tensors, on the layer's device."""
        return self._read(f"{self.name}.{part}").to(self.device)

    def bias(self) -> Tensor | None:
        """In the dtype of what is not quantized; None where there is none."""
        return self.read("bias").to(self.dtype) if self.has("bias") else None

    def parts(self, start: str) -> dict[str, Tensor]:
        """The layer's tensors whose names begin so, by the rest of their names."""
        whole = f"{self.name}.{start}"
        return {
            key.removeprefix(whole): self._read(key).to(self.device) for key in self.dtypes if key.startswith(whole)
        }


def refuse_incomplete(where: str, what: str, layers: list[str]) -> None:
    """Raise a UserError where there are layers that lack what they must have beside their weights."""
    if layers:
        raise UserError(f"{where} lacks the {what} of {listing(layers)}: the file is incomplete; download it again")


class OnDisk(NamedTuple):
    """A format's layout in safetensors files.

    Attributes:
        backend: whose layers are written so.
        detect: takes a tensor's name and dtype; whether they show this format.
        check: takes all dtypes by name, the names of the linear layers, and what to call the files; raises a UserError
            where a quantized layer lacks what it must have.
        read: gives the layer, or None where it is not of this format.
        config: takes format, double_quant, the names of layers that are not quantized, and the dtype of the others;
            gives the quantization_config of config.json.
    """

    backend: str
    detect: Callable[[str, str], bool]
    check: Callable[[Mapping[str, str], Sequence[str], str], None]
    read: Callable[[StoredLayer], "QuantizedLinear | None"]
    config: Callable[[str, bool, list[str], torch.dtype], dict[str, Any]]
