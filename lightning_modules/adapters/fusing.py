"""LoRAs and whole transformers: one fused into the weights of the other, or extracted from a fine-tuned one."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError, listing
from foundation.files import replacing_folder
from lightning_modules.lora_files.delta import Delta, LowRank, best_of_rank
from lightning_modules.pretrained.checks import USUAL
from lightning_modules.pretrained.single_file import save_native
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.pretrained.weights import Weights, assemble, save_quantized, stored_layer, write_tensors
from lightning_modules.quantization.linear import QuantizedLinear
from lightning_modules.quantization.quantization import Quantization, return_freed_memory
from lightning_modules.timing import ProgressLines


class Rounding:
    """The share of the deltas that rounding or quantizing the weights loses."""

    def __init__(self) -> None:
        self._lost = self._whole = 0.0

    def note(self, before: Tensor, wanted: Tensor, written: Tensor) -> None:
        """Add a layer's weight without its delta, with it, and as written."""
        if not written.isfinite().all():
            raise UserError(f"the weights with the LoRA exceed the range of {str(written.dtype)[6:]}")
        self._lost += float((written.float() - wanted.float()).double().square().sum())
        self._whole += float((wanted.float() - before.float()).double().square().sum())

    @property
    def share(self) -> float:
        """Error over all layers, relative to the deltas (Frobenius norms)."""
        return (self._lost / self._whole) ** 0.5 if self._whole else 0.0


class FusedWeights(Weights):
    """A transformer's weights on disk, dequantized, with the deltas added, in its dtype; computes on a device."""

    def __init__(self, source: TransformerSource, deltas: Mapping[str, Delta], device: torch.device) -> None:
        self.stored = source.weights()
        self.dtypes, self.notes = self.stored.dtypes, self.stored.notes
        self.rounding = Rounding()
        self._dtype = source.dtype
        self._linears = {name: layer for name, layer in source.meta.named_modules() if isinstance(layer, nn.Linear)}
        self._deltas = deltas
        self._device = device

    def read(self, name: str) -> Tensor:
        layer, _, part = name.rpartition(".")
        linear, dtype = self._linears.get(layer) if part == "weight" else None, self._dtype
        quantized = None if linear is None else stored_layer(linear, layer, self.stored, self._device, dtype)
        weight = self.stored.read(name) if quantized is None else quantized.dequantize(torch.float32)
        delta = None if linear is None else self._deltas.get(layer)
        if delta is None:
            return weight.to("cpu", dtype)
        wanted = delta.updated(weight.to(self._device))
        written = wanted.to(dtype)
        self.rounding.note(weight.to(self._device), wanted, written)
        return written.cpu()


@torch.no_grad()
def write_fused(
    source: TransformerSource, deltas: Mapping[str, Delta], folder: Path, device: torch.device
) -> Rounding | None:
    """Write a transformer with deltas in its weights to a folder, in diffusers' layout.

    Plain weights are updated, and written in the model's dtype or quantized as configured; quantized layers on disk are
    dequantized, updated and quantized again in their own format.

    Returns:
        The loss by rounding; None if the weights are quantized for the first time.
    """
    fused = FusedWeights(source, deltas, device)
    weights, rounding = fused.stored, None
    with replacing_folder(folder) as unfinished:
        if weights.format is not None:  # plain layers stay as they are on disk
            quantization = Quantization(weights.format, (), ("transformer",), False)
            transformer = source.empty()
            assemble(transformer, weights, dtype=source.dtype, device=device, quantization=None)
            rounding = _requantize(transformer, deltas)
            save_quantized(transformer, quantization, unfinished)
        elif source.quantization is not None:
            transformer = source.empty()
            assemble(transformer, fused, dtype=source.dtype, device=device, quantization=source.quantization)
            save_quantized(transformer, source.quantization, unfinished)
        else:
            source.meta.save_config(unfinished)
            shapes = {name: torch.Size(shape) for name, shape in weights.shapes.items()}
            write_tensors(unfinished / USUAL["diffusers"], shapes, source.dtype, fused.read)
            rounding = fused.rounding
    return rounding


@torch.no_grad()
def fuse_to_file(source: TransformerSource, deltas: Mapping[str, Delta], path: Path, device: torch.device) -> Rounding:
    """Write a transformer with deltas in its weights to one file, unquantized, by the names of its authors."""
    fused = FusedWeights(source, deltas, device)
    save_native(path, fused.read, source.meta, source.native, source.dtype)
    return fused.rounding


def _requantize(transformer: nn.Module, deltas: Mapping[str, Delta]) -> Rounding:
    rounding = Rounding()
    for name, delta in deltas.items():
        layer: Any = transformer.get_submodule(name)
        quantized = isinstance(layer, QuantizedLinear)
        dtype = layer.compute_dtype if quantized else layer.weight.dtype
        before = layer.dequantize(torch.float32) if quantized else layer.weight.float()
        wanted = delta.updated(before)
        new: Any = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        new.weight = nn.Parameter(wanted.to(dtype), requires_grad=False)
        new.bias = layer.bias
        if quantized:
            new = Quantization(layer.storage.split()[0], (), (), layer.group > 1).quantize(new)
        rounding.note(before, wanted, new.dequantize(torch.float32) if quantized else new.weight)
        transformer.set_submodule(name, new)
        return_freed_memory()
    return rounding


@torch.no_grad()
def extract(
    base: TransformerSource, tuned: str, rank: int, device: torch.device
) -> tuple[dict[str, LowRank], float, list[str]]:
    """Return the best LoRA of a rank of the difference of two transformers, with one layer in memory at a time.

    Args:
        tuned: folder or hub id of a whole pipeline or of only the transformer.

    Returns:
        The deltas of the linear layers whose weights differ; the share of the difference that they lack, over all
        layers (Frobenius norm); the names of the other tensors that differ: biases and norms.
    """
    before, after = (one.plain_weights("extract=") for one in (base, replace(base, name=tuned, revision=None)))
    if different := sorted(before.dtypes.keys() ^ after.dtypes.keys()):
        raise UserError(f"extract={tuned} is not a version of {base.name}: only one of them has {listing(different)}")
    layers = {f"{name}.weight" for name, module in base.meta.named_modules() if isinstance(module, torch.nn.Linear)}
    deltas, others, lost, whole = {}, [], 0.0, 0.0
    progress = ProgressLines(len(before.dtypes), "tensors")
    for index, name in enumerate(sorted(before.dtypes), 1):
        one, other = (weights.read(name).to(device).float() for weights in (before, after))
        if one.shape != other.shape:
            raise UserError(f"extract={tuned}: {name} is {tuple(other.shape)}, in {base.name} {tuple(one.shape)}")
        difference = other - one
        if not difference.isfinite().all():
            raise UserError(f"extract={tuned}: {name} contains values that are not finite")
        if not difference.any():
            continue
        if name not in layers:
            others.append(name)
            continue
        layer = name.removesuffix(".weight")
        deltas[layer], error = best_of_rank(difference, rank)
        lost += error
        whole += float(difference.double().square().sum())
        progress.done(index)
    if not deltas:
        raise UserError(f"extract={tuned} does not differ from {base.name} in any linear layer")
    return deltas, (lost / whole) ** 0.5, others
