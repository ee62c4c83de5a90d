"""LoRA files applied to a transformer: the LoRAs of a prediction, and a training adapter."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foundation.errors import UserError, listing
from foundation.files import reading
from lightning_modules.adapters.adapter import Adapter, trainable
from lightning_modules.adapters.gates import NOT_MERGED, RankGate, read_rank_gate
from lightning_modules.adapters.lora import attach_magnitudes
from lightning_modules.adapters.peft_layers import ADAPTER, activate, enable, without_adapters
from lightning_modules.adapters.targets import last_match, require_matches
from lightning_modules.lora_files.compatibility import misread
from lightning_modules.lora_files.delta import Delta, LowRank
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.names import LayerNames
from lightning_modules.lora_files.reading import LoRAFile, find_or_download
from lightning_modules.lora_files.writing import encode
from lightning_modules.pretrained.frozen_base import FrozenBase


class AppliedLoRAs:
    """LoRAs next to a transformer's weights, multiplied by one factor.

    Args:
        files: their weights.
        scales: factors of layers by patterns of diffusers' layer names; the last match counts, else 1.
        weights: strength of each file, which the other scales multiply; None for 1.

    Attributes:
        rank_gates: gates of the T-LoRAs, once they are loaded.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        scales: Mapping[str, float] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.files = [Path(file) for file in files]
        self.weights = [1.0] * len(self.files) if weights is None else list(weights)
        self.scales = dict(scales or {})
        self.rank_gates: list[RankGate] = []
        self._scale: float | None = None

    @property
    def used(self) -> dict[str, tuple[Path, float]]:
        """Each file with a weight other than 0, and that weight, by its adapter name."""
        weighted = zip(self.files, self.weights, strict=True)
        return {f"lora_{index}": one for index, one in enumerate(weighted) if one[1] != 0}

    def check_files(self, base: FrozenBase) -> None:
        """Raise a UserError for files that do not fit the base."""
        if not self.files:
            return
        names = base.layer_names
        adapted: set[str] = set()
        for path in self.files:
            meanings = LoRAFile(path).match(names, base.name)
            adapted.update(layer for meaning in meanings.values() for layer in meaning.layers)
        require_matches("lora_scale", self.scales, [layer for layer in names.shapes if layer in adapted])

    def load(self, transformer: Any, base: FrozenBase) -> None:
        """Load them into diffusers' transformer, frozen."""
        from lightning_modules.adapters.factored import add_deltas

        self.rank_gates = []
        names = base.layer_names
        others: dict[str, dict[str, Delta]] = {}
        for name, (path, _) in self.used.items():
            read = LoRAFile(path).read(names, base.name)
            scales = {layer: last_match(self.scales, layer, 1.0) for layer in read}
            # Without layers of scale 0: a DoRA scales its rows, however small the update is.
            updates = {layer: one.scaled(scales[layer]) for layer, one in read.items() if scales[layer]}
            if not updates:
                raise UserError(f"lora_scale leaves no layer of {path}: leave the LoRA out")
            others[name] = {layer: one for layer, one in updates.items() if not isinstance(one, LowRank)}
            loras = {layer: one for layer, one in updates.items() if isinstance(one, LowRank)}
            if loras:
                # peft's own DoRA fails on some quantized layers: ours is attached to its LoRA.
                plain = {layer: replace(one, magnitude=None) for layer, one in loras.items()}
                with reading(path, "please report it"):
                    state = encode(plain, "diffusers")
                    transformer.load_lora_adapter(state, prefix="transformer", adapter_name=name)
                magnitudes = {layer: one.magnitude for layer, one in loras.items() if one.magnitude is not None}
                attach_magnitudes(transformer, name, magnitudes)
                if wrong := misread(transformer, name, loras):
                    raise UserError(f"{path}: diffusers reads {listing(wrong)} wrongly or not at all. Please report it")
            if (gate := read_rank_gate(path)) is not None:
                gate.attach(transformer, name)
                self.rank_gates.append(gate)
        for name, factors in others.items():  # around peft's layers, which find theirs by name
            add_deltas(transformer, name, {layer: one.to(base.dtype) for layer, one in factors.items()})
        transformer.requires_grad_(False)

    def set_scale(self, transformer: Any, scale: float) -> None:
        """Multiply their weights by a factor."""
        if not self.used or scale == self._scale:
            return
        self._scale = scale
        transformer.set_adapters(list(self.used), [scale * weight for _, weight in self.used.values()])
        enable(transformer, scale != 0)  # at 0 a DoRA would still scale rows


class TrainingAdapter:
    """A frozen LoRA that is in the transformer while it trains; images, validation and files are without it.

    It undoes the distillation of a base (https://huggingface.co/ostris/zimage_turbo_training_adapter), so that the
    trained adapter learns the edit only.

    Args:
        name: a file, a folder, or owner/name on the hub.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise UserError(f"model.training_adapter={name}: name one LoRA, a file, a folder or owner/name on the hub")
        self.name = name
        self._lora = AppliedLoRAs([])

    @cached_property
    def file(self) -> LoRAFile:
        """Its weights, which are downloaded if needed."""
        return LoRAFile(find_or_download(self.name))

    def check(self, base: FrozenBase, adapter: Adapter) -> None:
        """Raise a UserError for a file, or an adapter, that it cannot train with, before any weights are read."""
        setting = f"model.training_adapter={self.name}"
        if adapter.trains_base:
            raise UserError(f"{setting}: with adapter=full all weights would learn to replace it. Use adapter=lora.")
        if not adapter.adds_to_outputs:
            raise UserError(f"{setting}: {adapter} would change its output as well. Use adapter=lora.")
        self.file.match(base.layer_names, base.name)
        if read_rank_gate(self.file.path) is not None:
            raise UserError(f"{setting}: {NOT_MERGED}; task=export rank=N makes a plain LoRA of it")
        if common_kind(self.file.empty.values()) == "DoRA":
            raise UserError(f"{setting}: a LoRA, LoKr or LoHa is needed, not DoRA")

    def load(self, transformer: Any, base: FrozenBase) -> None:
        """Load it into a transformer that has the trained adapter."""
        self._lora = AppliedLoRAs([self.file.path])
        trained = trainable(transformer).values()
        self._lora.load(transformer, base)  # freezes everything
        for parameter in trained:
            parameter.requires_grad_(True)
        activate(transformer, [*self._lora.used, ADAPTER])

    def left_out(self, transformer: Any) -> AbstractContextManager[None]:
        """Temporarily compute without it, the same bits as if it had never been loaded."""
        return without_adapters(transformer, list(self._lora.used))

    def memory(self, base: FrozenBase) -> int:
        """Return its bytes on the device."""
        sizes = (math.prod(self.file.shapes[key]) for parts in self.file.parts.values() for key in parts.values())
        return sum(sizes) * base.dtype.itemsize


def load_adapter(transformer: Any, lora: str | Path, adapter_name: str = "default") -> None:
    """Load a LoKr or LoHa of Retouch into diffusers' transformer, whatever its precision.

    Args:
        lora: a run's folder, a weights folder or a file, with diffusers' layer names.
        adapter_name: for `set_adapters`.
    """
    from lightning_modules.adapters.factored import add_deltas

    path = find_or_download(str(lora))
    updates = LoRAFile(path).read(LayerNames(transformer), type(transformer).__name__)
    others = {layer: one.to(transformer.dtype) for layer, one in updates.items() if not isinstance(one, LowRank)}
    if len(others) < len(updates):
        mixed = " in some layers: use predict.py" if others else ": diffusers reads it by pipe.load_lora_weights"
        raise UserError(f"{path} is a LoRA{mixed}")
    add_deltas(transformer, adapter_name, others)
    transformer.requires_grad_(False)
