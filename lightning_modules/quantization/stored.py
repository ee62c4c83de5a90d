"""Quantized layers in safetensors files: the tensors of a layer, and the layout of a format."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from datamodules.errors import UserError, listing

if TYPE_CHECKING:
    from lightning_modules.quantization.linear import QuantizedLinear

# Names of a layer's scale: diffusers' and ComfyUI's.
SCALES = ("weight_scale", "scale_weight")
# Names of scales of inputs, which are not used: inputs are scaled by their own size.
HINTS = ("input_scale", "scale_input")
# All of these, and ComfyUI's note of the format.
SCALED = "|".join((*SCALES, *HINTS, "comfy_quant"))


class StoredLayer:
    """A linear layer's tensors on disk.

    Args:
        name: of the layer.
        dtypes: safetensors' dtype names of all tensors in the files, by tensor name.
        read: returns the tensor of a name.
        device: of the layer that is read.
        dtype: of its unquantized tensors.
    """

    def __init__(
        self,
        name: str,
        dtypes: Mapping[str, str],
        read: Callable[[str], Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.dtypes = dtypes
        self._read = read
        self.device = device
        self.dtype = dtype

    @property
    def kind(self) -> str:
        """The dtype of its weight, by safetensors' name."""
        return self.dtypes[f"{self.name}.weight"]

    def has(self, part: str) -> bool:
        """Return whether the layer has this tensor."""
        return f"{self.name}.{part}" in self.dtypes

    def read(self, part: str) -> Tensor:
        """Read one of its tensors to the layer's device."""
        return self._read(f"{self.name}.{part}").to(self.device)

    def bias(self) -> Tensor | None:
        """Read its bias in `dtype`; None without one."""
        return self.read("bias").to(self.dtype) if self.has("bias") else None

    def scale(self, rows: int) -> Tensor | None:
        """Read its scale (out, 1) or (1, 1) in float32, None without one; raise a UserError for another shape."""
        scale = next((self.read(name) for name in SCALES if self.has(name)), None)
        if scale is not None and scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
            raise UserError(
                f"{self.name} has scales {tuple(scale.shape)} on disk: expected one for the layer, or one for each row"
            )
        return None if scale is None else scale.float().reshape(-1, 1)

    def parts(self, start: str) -> dict[str, Tensor]:
        """Read the layer's tensors whose names begin so, by the rest of their names."""
        whole = f"{self.name}.{start}"
        names = [name.removeprefix(whole) for name in self.dtypes if name.startswith(whole)]
        return {name: self.read(start + name) for name in names}


class Layout(NamedTuple):
    """A format's layout in safetensors files.

    Attributes:
        backend: that writes it.
        dtypes: safetensors' dtype names of its weights.
        companions: pattern of the names of a layer's other tensors.
        needs: companions of which a layer must have one.
        read: returns the layer, or None if it is not of this format.
        sign: part of a tensor name that identifies the format; None where the weights' dtype does.
        marker: name of a tensor without which a file may contain weights only.
    """

    backend: str
    dtypes: Collection[str]
    companions: str
    needs: Sequence[str]
    read: Callable[[StoredLayer], "QuantizedLinear | None"]
    sign: str | None = None
    marker: str | None = None

    def detect(self, name: str, dtype: str) -> bool:
        """Return whether a tensor of this name and dtype identifies the format."""
        return self.sign in name if self.sign else name.endswith(".weight") and dtype in self.dtypes

    def readable(self, dtypes: Mapping[str, str], layers: Collection[str], where: str) -> set[str]:
        """Return the names of the tensors that it reads.

        Args:
            dtypes: of all tensors, by name.
            layers: the model's linear layers.

        Raises:
            UserError: a quantized layer lacks its companions.
        """
        quantized = {name for name in layers if dtypes[f"{name}.weight"] in self.dtypes}
        matches = [re.fullmatch(rf"(.+)\.({self.companions})", name) for name in dtypes]
        found = [match for match in matches if match and match[1] in quantized]
        read = {match[0] for match in found} | ({self.marker} if self.marker and self.marker in dtypes else set())
        if self.marker and not read:
            return {name for name, dtype in dtypes.items() if dtype in self.dtypes}
        if lacking := sorted(quantized - {match[1] for match in found if match[2] in self.needs}):
            raise UserError(
                f"{where} lacks the scales of {listing(lacking)}: the file is incomplete; download it again"
            )
        return read | {f"{name}.weight" for name in quantized}
