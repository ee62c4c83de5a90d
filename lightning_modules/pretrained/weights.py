"""A transformer's weights on disk, in 16 bits or quantized: read one tensor at a time, into the layers they are for."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from datamodules.errors import UserError, listing
from datamodules.files import reading
from lightning_modules.execution.freed_memory import return_freed_memory
from lightning_modules.pretrained.component_files import GET_AGAIN
from lightning_modules.quantization.formats import FORMATS
from lightning_modules.quantization.quantization import Quantization
from lightning_modules.quantization.stored import OnDisk, StoredLayer
from lightning_modules.timing import SECONDS_BETWEEN_LINES

if TYPE_CHECKING:
    from lightning_modules.quantization.linear import QuantizedLinear

log = logging.getLogger("retouch")

# Pages of a file stay in memory as long as it is open.
REOPEN_AFTER = 128 * 2**20


class Weights(Protocol):
    """Tensors by name. `dtypes` are safetensors' names of theirs."""

    dtypes: dict[str, str]

    def read(self, name: str) -> Tensor:
        """One of them, for the caller to keep."""


class SafetensorsWeights:
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

    def read(self, name: str) -> Tensor:
        file = self._file[name]
        if self._open is None or self._open[0] != file or self._touched > REOPEN_AFTER:
            self._open, self._touched = (file, safe_open(file, "pt").__enter__()), 0
        tensor = self._open[1].get_tensor(name)
        self._touched += tensor.nbytes
        return tensor.clone()

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
    for layout in _layouts():
        layout.check(on_disk, layers, where)


def _layouts() -> list[OnDisk]:
    return [row.on_disk for row in FORMATS.values() if row.on_disk is not None]


def assemble(
    model: nn.Module,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    placement: Callable[[str], torch.device] | None = None,
) -> None:
    """Fill a model whose parameters are on the meta device, layer by layer.

    At no time does it take more memory than what is filled and a few copies of a layer.

    Args:
        quantization: of linear layers that are not quantized on disk; None leaves them as they are.
        placement: the device that a parameter or layer of this name ends on; None for `device`.
    """
    # Names and no modules: a layer that is replaced must go at once.
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    last = time.monotonic()
    for number, name in enumerate(names, 1):
        layer = _quantized_layer(model.get_submodule(name), weights, name, dtype, device, quantization)
        if layer is not None:
            model.set_submodule(name, layer if placement is None else layer.to(placement(name)))
            return_freed_memory()
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            log.info(f"{number} of {len(names)} layers")
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            value = weights.read(name).to(device if placement is None else placement(name), dtype)
            _compare(name, value.shape, parameter.shape)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    return_freed_memory()


def save_quantized(transformer: Any, quantization: Quantization, folder: Path) -> None:
    """Write a transformer that `assemble` quantized, in the layout that it reads; 4 and 8 bits are diffusers' own.

    Args:
        quantization: one that has a layout `on_disk`.
    """
    from huggingface_hub import save_torch_state_dict

    state = {name: tensor.contiguous() for name, tensor in transformer.state_dict().items()}
    plain = [name for name, module in transformer.named_modules() if type(module) is nn.Linear]
    assert quantization.on_disk is not None
    how = quantization.on_disk.config(quantization.format, quantization.double_quant, plain, transformer.dtype)
    transformer.register_to_config(quantization_config=how)
    transformer.save_config(folder)
    save_torch_state_dict(
        state, folder, filename_pattern="diffusion_pytorch_model{suffix}.safetensors", max_shard_size="10GB"
    )


def _quantized_layer(
    linear: nn.Module,
    weights: Weights,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
) -> nn.Module | None:
    """What takes a layer's place: as it is on disk, or quantized here; None where it stays as it is."""
    layer = _stored_layer(weights, name, dtype, device, quantization)
    if layer is not None:
        _compare(name, (layer.out_features, layer.in_features), (linear.out_features, linear.in_features))
        return layer
    if quantization is None or not quantization.converts(name, linear):
        return None
    tensors = {part: weights.read(f"{name}.{part}").to(device, dtype) for part, _ in linear.named_parameters()}
    for part, tensor in tensors.items():
        _compare(f"{name}.{part}", tensor.shape, linear.get_parameter(part).shape)
    linear.load_state_dict(tensors, assign=True)
    del tensors, tensor
    assert isinstance(linear, nn.Linear)
    return quantization.quantize(linear)


def _compare(name: str, on_disk: Sequence[Any], wanted: Sequence[Any]) -> None:
    if tuple(on_disk) != tuple(wanted):
        stored, own = ("x".join(map(str, shape)) for shape in (on_disk, wanted))
        raise UserError(f"{name} is {stored} on disk, {own} in the model")


def _stored_layer(
    weights: Weights, name: str, dtype: torch.dtype, device: torch.device, quantization: Quantization | None
) -> "QuantizedLinear | None":
    """The layer as it is on disk; None where it is not quantized there."""
    gradient_dtype = torch.float8_e5m2 if quantization is None else quantization.gradient_dtype
    stored = StoredLayer(name, weights.dtypes, weights.read, device, dtype, gradient_dtype)
    return next((layer for layout in _layouts() if (layer := layout.read(stored)) is not None), None)
