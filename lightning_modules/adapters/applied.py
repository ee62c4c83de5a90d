"""LoRA files that are used in prediction: checked, loaded, scaled, merged into the weights that they adapt."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError, listing
from datamodules.files import reading
from lightning_modules.adapters.formats.checked import require_loaded
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.written import FORMATS, encode
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.adapters.rank_mask import NOT_MERGED, RANK_MASK_CALLBACKS, RankGate, read_rank_gate
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import DTYPES


class AppliedLoRAs:
    """The LoRAs of a prediction, weighed by one factor.

    Args:
        files: their weights.
        merge: whether they become a part of the transformer's weights while pictures are made.
        scales: of layers, by patterns of diffusers' names of them: the last one that matches holds, else it is 1.

    Attributes:
        rank_gates: of those that are T-LoRAs, once they are loaded.
        callbacks: what a run with them needs, as `Adapter.callbacks`.
    """

    callbacks = RANK_MASK_CALLBACKS

    def __init__(
        self, files: Sequence[str | Path], merge: bool = False, scales: Mapping[str, float] | None = None
    ) -> None:
        self.files = [Path(file) for file in files]
        self.merge = merge
        self.scales = dict(scales or {})
        self.rank_gates: list[RankGate] = []
        self._merged: MergedLoRAs | None = None
        self._scale: float | None = None

    @property
    def names(self) -> list[str]:
        """What they are called in the transformer."""
        return [f"lora_{number}" for number in range(len(self.files))]

    def check(self, base: FrozenBase) -> None:
        """Raise a UserError for files that do not fit the base, or cannot be merged into it."""
        if not self.files:
            return
        names = LayerNames.of(base)
        adapted: set[str] = set()
        for path in self.files:
            meanings = LoRAFile(path).check(names, base.name)
            adapted.update(layer for meaning in meanings.values() for layer in meaning.layers)
            if self.merge and read_rank_gate(path) is not None:
                raise UserError(f"merge_lora=true: {NOT_MERGED}")
        for pattern, scale in self.scales.items():
            if not any(fnmatchcase(layer, pattern) for layer in adapted):
                own = [re.sub(r"\.\d+\..*", ".*", layer) for layer in names.sides if layer in adapted]
                blocks = sorted(dict.fromkeys(own), key=lambda one: not one.endswith("*"))
                raise UserError(
                    f"lora_scale={{{pattern}:{scale:g}}} matches no layer of the LoRA; it has {listing(blocks, 6)}"
                )
        if self.merge:
            precision = base.source.expected_precision
            if precision not in DTYPES:
                raise UserError(
                    f"merge_lora=true needs a base in bf16 or float32: rounding to {precision} would lose the LoRA"
                )
            if base.source.streamed:
                raise UserError("merge_lora=true does not go with model.offload.blocks")

    def load(self, transformer: Any, base: FrozenBase) -> None:
        """Put them into a loaded transformer of diffusers, frozen.

        Raises:
            UserError: a file holds no LoRA of this model.
        """
        self.rank_gates = []
        names = LayerNames.of(base)
        for name, path in zip(self.names, self.files, strict=True):
            read = LoRAFile(path).read(names, base.name)
            scales = {layer: self._scale_of(layer) for layer in read}
            # A DoRA scales its rows, however small the update is: a layer without it is left out.
            left_out = {layer for layer, update in read.items() if not scales[layer] and update.magnitude is not None}
            updates = {layer: one.scaled(scales[layer]) for layer, one in read.items() if layer not in left_out}
            if not updates:
                raise UserError(f"lora_scale leaves no layer of {path}: leave the LoRA out")
            state = encode(updates, FORMATS["diffusers"])
            with reading(path, "please report it"):
                transformer.load_lora_adapter(state, prefix="transformer", adapter_name=name)
            require_loaded(transformer, name, updates, path)
            gate = read_rank_gate(path)
            if gate is not None:
                gate.attach(transformer, name)
                self.rank_gates.append(gate)
        transformer.requires_grad_(False)

    def _scale_of(self, layer: str) -> float:
        matching = (scale for pattern, scale in reversed(self.scales.items()) if fnmatchcase(layer, pattern))
        return next(matching, 1.0)

    def set_scale(self, transformer: Any, scale: float) -> None:
        """Weigh them, all by the same factor."""
        if not self.files or scale == self._scale:
            return
        self._scale = scale
        transformer.set_adapters(self.names, [scale] * len(self.files))
        if scale == 0:  # a DoRA would go on to scale rows
            transformer.disable_adapters()
        else:
            transformer.enable_adapters()
        if self.merge:
            self._merged = self._merged or MergedLoRAs(transformer, self.names)
            self._merged.merge()

    def unmerge(self) -> None:
        """Give the transformer its own weights back."""
        if self._merged is not None:
            self._merged.unmerge()
        self._merged = self._scale = None


class MergedLoRAs:
    """Adds LoRAs to a transformer's weights, and gives these back bitwise; the originals wait in the host's memory.

    Raises:
        UserError: an adapter is no plain LoRA.
    """

    def __init__(self, transformer: Any, names: Sequence[str]) -> None:
        self.transformer = transformer
        self.names = names
        self._layers = [layer for name in names for layer in lora_layers(transformer, name).values()]
        self._layers = list(dict.fromkeys(self._layers))
        self._originals: list[Tensor] | None = None
        for layer in self._layers:
            if any(layer.use_dora.get(name) or layer.lora_bias.get(name) for name in names):
                raise UserError("merge_lora=true is for plain LoRAs, this one has DoRA or biases: leave merge_lora out")

    @torch.no_grad()
    def merge(self) -> None:
        """Weights become W + the sum of the adapters' scaling B A, rounded once, and the adapters rest."""
        if self._originals is None:
            self._originals = [_weight(layer).to("cpu", copy=True) for layer in self._layers]
        for layer, original in zip(self._layers, self._originals, strict=True):
            weight = _weight(layer)
            merged = original.to(weight.device, torch.float32, copy=True)
            for name in self.names:
                if name in layer.lora_A:
                    down, up = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
                    merged += layer.scaling[name] * (up @ down)
            weight.copy_(merged)
        self.transformer.disable_adapters()

    @torch.no_grad()
    def unmerge(self) -> None:
        """As before."""
        for layer, original in zip(self._layers, self._originals or [], strict=self._originals is not None):
            _weight(layer).copy_(original)
        self._originals = None
        self.transformer.enable_adapters()


def _weight(layer: Any) -> Tensor:
    return layer.get_base_layer().weight.data
