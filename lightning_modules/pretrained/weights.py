"""A transformer's weights on disk, in 16 bits or quantized: read one tensor at a time."""

import threading
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from datamodules.files import reading
from lightning_modules.pretrained.component_files import GET_AGAIN
from lightning_modules.quantization.formats import FORMATS
from lightning_modules.quantization.stored import OnDisk

# Pages of a file stay in memory as long as it is open.
REOPEN_AFTER = 128 * 2**20


class Weights(Protocol):
    """Tensors by name. `dtypes` are safetensors' names of theirs."""

    dtypes: dict[str, str]

    def read(self, name: str) -> Tensor:
        """One of them, for the caller to keep; several threads may."""

    def map(self, name: str) -> Tensor:
        """One of them where it is."""
        return self.read(name)


class SafetensorsWeights(Weights):
    """The tensors of a model's safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.dtypes: dict[str, str] = {}
        self._file: dict[str, Path] = {}
        for file in files:
            with reading(file, GET_AGAIN), safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    self.dtypes[name] = opened.get_slice(name).get_dtype()
                    self._file[name] = file
        self._open: tuple[Path, Any] | None = None
        self._touched = 0
        self._lock = threading.Lock()

    def read(self, name: str) -> Tensor:
        return self.map(name).clone()

    def map(self, name: str) -> Tensor:
        """One of them in its file: pages are read when they are used, and the system may drop them."""
        with self._lock:
            file = self._file[name]
            if self._open is None or self._open[0] != file or self._touched > REOPEN_AFTER:
                self._open, self._touched = (file, safe_open(file, "pt").__enter__()), 0
            tensor = self._open[1].get_tensor(name)
            self._touched += tensor.nbytes
            return tensor

    def on_meta(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Their shapes, as tensors of this dtype."""
        shapes = {}
        for file in sorted(set(self._file.values())):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    shapes[name] = torch.empty(opened.get_slice(name).get_shape(), dtype=dtype, device="meta")
        return shapes

    @cached_property
    def format(self) -> str | None:
        """The format that linear layers are quantized in; None for 16 or 32 bits."""
        for name, dtype in self.dtypes.items():
            for format, row in FORMATS.items():
                if row.on_disk is not None and row.on_disk.detect(name, dtype):
                    return format
        return None


def check_names(weights: Weights, model: nn.Module, where: str) -> None:
    """Compare the names on disk with those of a model, which may be on the meta device.

    Raises:
        UserError: a tensor is missing, or what a quantized one must have beside it.
    """
    on_disk = weights.dtypes
    missing = [name for name, _ in model.named_parameters() if name not in on_disk]
    if missing:
        raise UserError(f"{where} lacks {listing(missing)}: is it complete, and made for {type(model).__name__}?")
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for layout in layouts():
        layout.check(on_disk, layers, where)


def layouts() -> list[OnDisk]:
    """Of all formats that have one."""
    return [row.on_disk for row in FORMATS.values() if row.on_disk is not None]
