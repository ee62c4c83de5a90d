"""Transformers whose weights have updates of their layers in them, plain or quantized, written to disk."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from datamodules.errors import UserError
from datamodules.files import replacing_folder
from lightning_modules.adapters.update import Update
from lightning_modules.execution.host_memory import return_freed_memory
from lightning_modules.pretrained.transformer import TransformerSource, transformer_weights
from lightning_modules.pretrained.weights import FILE_SIZE, SafetensorsWeights, Weights, assemble, save_quantized
from lightning_modules.quantization.linear import QuantizedLinear
from lightning_modules.quantization.quantization import Quantization

log = logging.getLogger("retouch")


class Rounding:
    """How much of the updates is lost because weights are rounded or quantized."""

    def __init__(self) -> None:
        self._lost = self._whole = 0.0

    def note(self, before: Tensor, wanted: Tensor, written: Tensor) -> None:
        """A layer's weight without its update, with it, and with it as it is written."""
        if not written.isfinite().all():
            raise UserError(f"the weights with the LoRA in them are beyond the range of {str(written.dtype)[6:]}")
        self._lost += float((written.float() - wanted.float()).double().square().sum())
        self._whole += float((wanted.float() - before.float()).double().square().sum())

    @property
    def share(self) -> float:
        """The error of all layers together, relative to the updates (Frobenius norms)."""
        return (self._lost / self._whole) ** 0.5 if self._whole else 0.0


class FusedWeights(Weights):
    """Weights on disk that have the updates in them.

    Args:
        updates: by the names of the layers.
        dtype: of the weights with them.
        device: to compute on.
    """

    def __init__(
        self, weights: SafetensorsWeights, updates: Mapping[str, Update], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtypes = weights.dtypes
        self._dtype = dtype
        self.rounding = Rounding()
        self._weights = weights
        self._updates = updates
        self._device = device

    def read(self, name: str) -> Tensor:
        weight = self._weights.read(name)
        update = self._updates.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if update is None:
            return weight.to(self._dtype)
        wanted = update.updated(weight.to(self._device))
        written = wanted.to(self._dtype)
        self.rounding.note(weight.to(self._device), wanted, written)
        return written.cpu()


@torch.no_grad()
def write_fused(
    source: TransformerSource, updates: Mapping[str, Update], folder: Path, device: torch.device
) -> Rounding | None:
    """Write a transformer with updates in its weights to a folder, in diffusers' layout.

    What is not quantized on disk is written in the model's dtype, or quantized as the settings say, after the updates
    are in; what is quantized there is dequantized, updated and quantized again, each layer in its own format.

    Args:
        device: to compute on.

    Returns:
        What is lost by rounding; None where the weights are quantized for the first time.

    Raises:
        UserError: the weights are no safetensors files, or the folder cannot be written.
    """
    weights = transformer_weights(source.repository, source.revision)
    if weights is None:
        raise UserError(f"{source.name}: only safetensors weights can take a LoRA in")
    fused = FusedWeights(weights, updates, source.dtype, device)
    with replacing_folder(folder) as unfinished:
        if weights.format is None and source.quantization is None:
            _write_plain(source, weights, fused, unfinished)
            return fused.rounding
        quantization = source.quantization if weights.format is None else _as_stored(source, weights.format)
        assert quantization is not None
        transformer = source.empty()
        rounding = None
        if weights.format is None:
            assemble(transformer, fused, dtype=source.dtype, device=device, quantization=quantization)
        else:  # also what is not quantized is as it is on disk
            assemble(transformer, weights, dtype=source.dtype, device=device, quantization=None)
            rounding = _requantize(transformer, updates, quantization)
        save_quantized(transformer, quantization, unfinished)
        return rounding


def _write_plain(source: TransformerSource, weights: SafetensorsWeights, fused: FusedWeights, folder: Path) -> None:
    """One file after the other, of which one is in memory."""
    source.meta.save_config(folder)
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    plan = split_torch_state_dict_into_shards(
        weights.on_meta(source.dtype), filename_pattern=pattern, max_shard_size=FILE_SIZE
    )
    for number, (file, names) in enumerate(plan.filename_to_tensors.items(), 1):
        log.info(f"writing file {number} of {len(plan.filename_to_tensors)}")
        tensors = {name: fused.read(name) for name in names}
        safetensors.torch.save_file(tensors, folder / file, {"format": "pt"})
        del tensors
        return_freed_memory()
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / f"{pattern.format(suffix='')}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _as_stored(source: TransformerSource, format: str) -> Quantization:
    """How a transformer was quantized that is so on disk."""
    settings = source.config().get("quantization_config") or {}
    double_quant = bool(settings.get("bnb_4bit_use_double_quant"))
    return Quantization(format, None, (), ("transformer",), double_quant)


def _requantize(transformer: nn.Module, updates: Mapping[str, Update], quantization: Quantization) -> Rounding:
    """Put updates into a transformer whose layers are quantized already."""
    rounding = Rounding()
    for name, update in updates.items():
        layer: Any = transformer.get_submodule(name)
        quantized = isinstance(layer, QuantizedLinear)
        dtype = layer.compute_dtype if quantized else layer.weight.dtype
        before = layer.dequantize(torch.float32) if quantized else layer.weight.float()
        wanted = update.updated(before)
        new: Any = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        new.weight = nn.Parameter(wanted.to(dtype), requires_grad=False)
        new.bias = layer.bias
        if quantized:
            new = quantization.quantize(new)
        rounding.note(before, wanted, new.dequantize(torch.float32) if quantized else new.weight)
        transformer.set_submodule(name, new)
        return_freed_memory()
    return rounding
