"""Filling a model whose parameters are on the meta device, layer by layer, each quantized on its way."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.execution.freed_memory import return_freed_memory
from lightning_modules.pretrained.component_files import read_json
from lightning_modules.pretrained.weights import PLAIN, Weights, layouts
from lightning_modules.quantization.formats import FORMATS
from lightning_modules.quantization.quantization import Quantization
from lightning_modules.quantization.stored import StoredLayer
from lightning_modules.timing import SECONDS_BETWEEN_LINES

if TYPE_CHECKING:
    from lightning_modules.quantization.linear import QuantizedLinear

log = logging.getLogger("retouch")

# Tensors that wait or are being read: as many threads read, and so much more memory is taken.
AHEAD = 2
# Bytes at which a new file begins.
FILE_SIZE = 2 * 10**9


class ReadAhead(Weights):
    """Weights of which some are read by threads before they are asked for.

    Args:
        names: of the tensors that will be asked for, in this order; others are read when they are.
    """

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        self.dtypes = weights.dtypes
        self._weights = weights
        self._waiting = deque(names)
        self._coming: dict[str, Future[Tensor]] = {}
        self._threads = ThreadPoolExecutor(AHEAD, "read")

    def read(self, name: str) -> Tensor:
        self._begin()
        coming = self._coming.pop(name, None)
        self._begin()
        return self._weights.read(name) if coming is None else coming.result()

    def _begin(self) -> None:
        while self._waiting and len(self._coming) < AHEAD:
            following = self._waiting.popleft()
            self._coming[following] = self._threads.submit(self._weights.read, following)


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
    converted = [name for name in names if quantization and _converts(quantization, model, weights, name)]
    ahead = ReadAhead(weights, [f"{name}.weight" for name in converted])
    layer: nn.Module | None
    last = time.monotonic()
    for number, name in enumerate(names, 1):
        place = device if placement is None else placement(name)
        if quantization is not None and name in converted:
            layer = _converted_layer(model.get_submodule(name), ahead, name, dtype, device, quantization)
            layer = layer if place == device else layer.to(place)
        else:
            layer = _stored_layer(model.get_submodule(name), weights, name, dtype, place, quantization)
        if layer is not None:
            model.set_submodule(name, layer)
            return_freed_memory()
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            log.info(f"{number} of {len(names)} layers")
    # A file of which little is used would keep its pages in memory: it is copied from.
    read = weights.read if converted else weights.map
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            value = read(name).to(device if placement is None else placement(name), dtype)
            _compare(name, value.shape, parameter.shape)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    return_freed_memory()


def save_quantized(transformer: Any, quantization: Quantization, folder: Path) -> None:
    """Write a transformer that `assemble` quantized, in the layout that it reads; 4 and 8 bits are diffusers' own.

    Args:
        quantization: one that has a layout `on_disk`.
    """
    from diffusers import BitsAndBytesConfig
    from huggingface_hub import save_torch_state_dict

    state = {name: tensor.contiguous() for name, tensor in transformer.state_dict().items()}
    plain = [name for name, module in transformer.named_modules() if type(module) is nn.Linear]
    format, four_bit = quantization.format, FORMATS[quantization.format].four_bit
    # As diffusers reads it; it must not take for its own what has scales of ours.
    how = {"quant_method": f"retouch_{format}"}
    if not any(name.endswith(".weight_scale") for name in state):
        how = BitsAndBytesConfig(
            load_in_8bit=not four_bit,
            load_in_4bit=four_bit,
            llm_int8_skip_modules=plain,
            bnb_4bit_quant_type=format if four_bit else "fp4",
            bnb_4bit_use_double_quant=quantization.double_quant,
            bnb_4bit_compute_dtype=transformer.dtype,
        ).to_dict()
    transformer.save_config(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(read_json(config) | {"quantization_config": how}, indent=2, default=str) + "\n")
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict(state, folder, filename_pattern=pattern, max_shard_size=FILE_SIZE)


def _converts(quantization: Quantization, model: nn.Module, weights: Weights, name: str) -> bool:
    """Whether a layer is to be quantized, and is not on disk."""
    return weights.dtypes[f"{name}.weight"] in PLAIN and quantization.converts(name, model.get_submodule(name))


def _converted_layer(
    linear: nn.Module,
    weights: Weights,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization,
) -> nn.Module:
    """A layer, read and quantized on the device."""
    tensors = {part: weights.read(f"{name}.{part}").to(device, dtype) for part, _ in linear.named_parameters()}
    for part, tensor in tensors.items():
        _compare(f"{name}.{part}", tensor.shape, linear.get_parameter(part).shape)
    linear.load_state_dict(tensors, assign=True)
    del tensors, tensor
    assert isinstance(linear, nn.Linear)
    return quantization.quantize(linear)


def _stored_layer(
    linear: nn.Module,
    weights: Weights,
    name: str,
    dtype: torch.dtype,
    place: torch.device,
    quantization: Quantization | None,
) -> "QuantizedLinear | None":
    """The layer as it is on disk, on the host in the memory of its file; None where it is not quantized there."""
    gradient_dtype = torch.float8_e5m2 if quantization is None else quantization.gradient_dtype
    stored = StoredLayer(name, weights.dtypes, weights.map, place, dtype, gradient_dtype)
    layer = next((layer for layout in layouts() if (layer := layout.read(stored)) is not None), None)
    if layer is not None:
        _compare(name, (layer.out_features, layer.in_features), (linear.out_features, linear.in_features))
    return layer


def _compare(name: str, on_disk: Sequence[Any], wanted: Sequence[Any]) -> None:
    if tuple(on_disk) != tuple(wanted):
        stored, own = ("x".join(map(str, shape)) for shape in (on_disk, wanted))
        raise UserError(f"{name} is {stored} on disk, {own} in the model")
