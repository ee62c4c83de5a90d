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
from lightning_modules.pretrained.component_files import GET_AGAIN
from lightning_modules.pretrained.components import SECONDS_BETWEEN_LINES
from lightning_modules.pretrained.freed_memory import return_freed_memory
from lightning_modules.quantization.quantization import Quantization

if TYPE_CHECKING:
    from lightning_modules.quantization.linear import QuantizedLinear

log = logging.getLogger("retouch")

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
# diffusers' name of a layer's scale, and ComfyUI's; scales of inputs are hints, for ours are taken from the inputs.
SCALES = ("weight_scale", "scale_weight")
HINTS = ("input_scale", "scale_input")
# Whose layers have a layout on disk.
WRITTEN_BACKENDS = ("retouch", "bitsandbytes")
FOUR_BIT = "weight.quant_state.bitsandbytes__"
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
            if FOUR_BIT in name:
                return name.rpartition("__")[2]
            if name.endswith(".weight") and dtype in FLOAT8:
                return "fp8"
            if name.endswith(".SCB"):
                return "int8"
        return None


def check(weights: Weights, model: nn.Module, where: str) -> None:
    """Compare the names on disk with those of a model, which may be on the meta device.

    Raises:
        UserError: a tensor is missing, or what a quantized one must have beside it.
    """
    on_disk = weights.dtypes
    missing = [name for name, _ in model.named_parameters() if name not in on_disk]
    if missing:
        raise UserError(f"{where} lacks {listing(missing)}: is it whole, and made for {type(model).__name__}?")
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kinds = {name: on_disk[f"{name}.weight"] for name in layers}
    scaled = "scaled_fp8" in on_disk or any(name.endswith(SCALES) for name in on_disk)
    no_scale = [
        name
        for name, kind in kinds.items()
        if scaled and kind in FLOAT8 and not any(f"{name}.{scale}" in on_disk for scale in SCALES)
    ]
    no_state = [
        name
        for name, kind in kinds.items()
        if (kind == "U8" and not any(f"{name}.{FOUR_BIT}{quant}" in on_disk for quant in ("fp4", "nf4")))
        or (kind == "I8" and f"{name}.SCB" not in on_disk)
    ]
    strange = [
        name
        for name in on_disk
        if "scale" in name.rpartition(".")[2]
        and not name.endswith((*SCALES, *HINTS))
        and kinds.get(name.rpartition(".")[0]) in FLOAT8
    ]
    if strange:
        raise UserError(f"{where} has {listing(strange)}, scales of a kind that is not known here")
    for lacking, what in ((no_scale, "scales"), (no_state, "quant state")):
        if lacking:
            raise UserError(f"{where} lacks the {what} of {listing(lacking)}: the file is not whole; get it again")


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
        quantization: by one of WRITTEN_BACKENDS.
    """
    from huggingface_hub import save_torch_state_dict

    state = {name: tensor.contiguous() for name, tensor in transformer.state_dict().items()}
    plain = [name for name, module in transformer.named_modules() if type(module) is nn.Linear]
    how: dict[str, Any] = {"quant_method": "retouch_fp8"}
    if quantization.backend == "bitsandbytes":
        from diffusers import BitsAndBytesConfig

        how = BitsAndBytesConfig(
            load_in_8bit=quantization.format == "int8",
            load_in_4bit=quantization.format != "int8",
            bnb_4bit_quant_type=quantization.format,
            bnb_4bit_use_double_quant=quantization.double_quant,
            bnb_4bit_compute_dtype=transformer.dtype,
            llm_int8_skip_modules=plain,
        ).to_dict()
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
    from lightning_modules.quantization.linear import FourBitLinear, Fp8Linear, Int8Linear

    def read(part: str) -> Tensor:
        return weights.read(f"{name}.{part}").to(device)

    kind = weights.dtypes[f"{name}.weight"]
    bias = read("bias").to(dtype) if f"{name}.bias" in weights.dtypes else None
    if kind in FLOAT8:
        weight = read("weight")
        scale = next((read(part) for part in SCALES if f"{name}.{part}" in weights.dtypes), torch.ones(1))
        if scale.numel() not in (1, len(weight)):
            raise UserError(
                f"{name} has scales {tuple(scale.shape)} on disk: known are one for all, or one for each row"
            )
        gradient_dtype = torch.float8_e5m2 if quantization is None else quantization.gradient_dtype
        return Fp8Linear(weight, scale.float().reshape(-1, 1).to(device), bias, dtype, gradient_dtype)
    if kind == "I8":
        return Int8Linear(read("weight"), read("SCB").float(), bias, dtype)
    start = f"{name}.weight."
    state = {
        key.removeprefix(start): read(key.removeprefix(f"{name}.")) for key in weights.dtypes if key.startswith(start)
    }
    if not state:
        return None
    import bitsandbytes as bnb

    try:
        quant_state = bnb.functional.QuantState.from_dict(state, device)
    except (KeyError, ValueError, AssertionError) as error:
        raise UserError(f"the quant state of {name} is damaged: {error}; get the file again") from error
    return FourBitLinear(read("weight").view(torch.uint8), quant_state, bias, dtype)
