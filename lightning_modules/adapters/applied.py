"""LoRA files that are used in prediction: checked, loaded, scaled, merged into the weights that they adapt."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError
from datamodules.files import reading
from lightning_modules.adapters.dora import attach_magnitudes, has_magnitude, row_factors
from lightning_modules.adapters.factors import Factors
from lightning_modules.adapters.formats.checked import require_loaded
from lightning_modules.adapters.formats.find import find_or_download
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.written import FORMATS, encode
from lightning_modules.adapters.kinds import kind_of
from lightning_modules.adapters.low_rank import LowRank
from lightning_modules.adapters.peft_layers import adapted_layers, enable, lora_layers, update_of
from lightning_modules.adapters.rank_mask import NOT_MERGED, RankGate, read_rank_gate
from lightning_modules.adapters.targets import last_match, require_matches
from lightning_modules.layers import NO_NATIVE_NAMES
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import DTYPES


class AppliedLoRAs:
    """The LoRAs of a prediction, weighted by one factor.

    Args:
        files: their weights.
        merge: whether they become a part of the transformer's weights while pictures are made.
        scales: of layers, by patterns of diffusers' names of them: the last one that matches holds, else it is 1.
        weights: the strength of each file, by which these are multiplied; None for 1.

    Attributes:
        rank_gates: of those that are T-LoRAs, once they are loaded.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        merge: bool = False,
        scales: Mapping[str, float] | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.files = [Path(file) for file in files]
        self.weights = None if weights is None else list(weights)
        self.merge = merge
        self.scales = dict(scales or {})
        self.rank_gates: list[RankGate] = []
        self._merged: MergedLoRAs | None = None
        self._scale: float | None = None

    @property
    def used(self) -> dict[str, tuple[Path, float]]:
        """Each file and its weight, by its name in the transformer; without those of weight 0."""
        weighted = zip(self.files, self.weights or [1.0] * len(self.files), strict=True)
        return {f"lora_{number}": one for number, one in enumerate(weighted) if one[1] != 0}

    def check(self, base: FrozenBase) -> None:
        """Raise a UserError for files that do not fit the base, or cannot be merged into it."""
        if not self.files:
            return
        names = LayerNames.of(base)
        adapted: set[str] = set()
        for path in self.files:
            meanings = LoRAFile(path).check(names, base.name)
            adapted.update(layer for meaning in meanings.values() for layer in meaning.layers)
            if len(self.files) > 1 and kind_of(LoRAFile(path).empty.values()) == "OFT":
                raise UserError(
                    f"lora={path} is an OFT, which turns what other LoRAs would see: name it alone, or put it into a "
                    "transformer by task=export fuse=true"
                )
            if self.merge and read_rank_gate(path) is not None:
                raise UserError(f"merge_lora=true: {NOT_MERGED}")
        require_matches("lora_scale", self.scales, [layer for layer in names.sides if layer in adapted])
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
        from lightning_modules.adapters.beside import put_beside

        self.rank_gates = []
        names = LayerNames.of(base)
        others: dict[str, dict[str, Factors]] = {}
        for name, (path, _) in self.used.items():
            read = LoRAFile(path).read(names, base.name)
            scales = {layer: last_match(self.scales, layer, 1.0) for layer in read}
            # A DoRA scales its rows, however small the update is: a layer without it is left out.
            left_out = {layer for layer, one in read.items() if not scales[layer] and "magnitude" in one.tensors()}
            updates = {layer: one.scaled(scales[layer]) for layer, one in read.items() if layer not in left_out}
            if not updates:
                raise UserError(f"lora_scale leaves no layer of {path}: leave the LoRA out")
            others[name] = {layer: one for layer, one in updates.items() if isinstance(one, Factors)}
            loras = {layer: one for layer, one in updates.items() if isinstance(one, LowRank)}
            if loras:
                # peft's own DoRA fails on some quantized layers: ours is put beside its LoRA.
                plain = {layer: one._replace(magnitude=None) for layer, one in loras.items()}
                with reading(path, "please report it"):
                    state = encode(plain, FORMATS["diffusers"])
                    transformer.load_lora_adapter(state, prefix="transformer", adapter_name=name)
                magnitudes = {layer: one.magnitude for layer, one in loras.items() if one.magnitude is not None}
                attach_magnitudes(transformer, name, magnitudes)
                require_loaded(transformer, name, loras, path)
            gate = read_rank_gate(path)
            if gate is not None:
                gate.attach(transformer, name)
                self.rank_gates.append(gate)
        for name, beside in others.items():  # around peft's layers, which know these by their names
            put_beside(transformer, name, {layer: one.to(base.dtype) for layer, one in beside.items()})
        transformer.requires_grad_(False)

    def set_scale(self, transformer: Any, scale: float) -> None:
        """Multiply their weights by a factor."""
        if not self.used or scale == self._scale:
            return
        self._scale = scale
        transformer.set_adapters(list(self.used), [scale * weight for _, weight in self.used.values()])
        enable(transformer, scale != 0)  # at 0 a DoRA would go on to scale rows
        if self.merge:
            self._merged = self._merged or MergedLoRAs(transformer, list(self.used))
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
        # By the linear layer: what adapts it, and the name by which it does.
        self._adapters: dict[Any, list[tuple[Any, str]]] = {}
        for name in names:
            for layer in adapted_layers(transformer, name):
                self._adapters.setdefault(layer.get_base_layer(), []).append((layer, name))
        for adapters in self._adapters.values():  # peft's are inside of ours
            adapters.sort(key=lambda one: not hasattr(one[0], "lora_A"))
        self._originals: list[Tensor] | None = None
        for layer in lora_layers(transformer).values():
            if any(layer.lora_bias.get(name) for name in names):
                raise UserError("merge_lora=true is for plain LoRAs, this one has biases: leave merge_lora out")

    @torch.no_grad()
    def merge(self) -> None:
        """Weights become those that the adapters update, rounded once, and the adapters rest.

        A DoRA scales the rows of what the adapters before it have made, as it does beside the weights.
        """
        if self._originals is None:
            self._originals = [linear.weight.data.to("cpu", copy=True) for linear in self._adapters]
        for (linear, adapters), original in zip(self._adapters.items(), self._originals, strict=True):
            weight = linear.weight.data
            weight.copy_(original)  # of which a DoRA knows the norms
            merged = original.to(weight.device)
            for layer, name in adapters:
                merged = update_of(layer, name).updated(merged)
                if has_magnitude(layer, name):
                    merged *= row_factors(layer, name)[:, None]
            weight.copy_(merged)
        enable(self.transformer, False)

    @torch.no_grad()
    def unmerge(self) -> None:
        """As before."""
        for linear, original in zip(self._adapters, self._originals or [], strict=self._originals is not None):
            linear.weight.data.copy_(original)
        self._originals = None
        enable(self.transformer, True)


def load_adapter(transformer: Any, lora: str | Path, adapter_name: str = "default") -> None:
    """Put a LoKr, LoHa or OFT of Retouch's into a transformer of diffusers', whatever weights that has.

    Args:
        lora: what `find_or_download` finds, with diffusers' names of the layers.
        adapter_name: by which `set_adapters` knows it.

    Raises:
        UserError: it is none, or of another model.
    """
    from lightning_modules.adapters.beside import put_beside

    path = find_or_download(str(lora))
    updates = LoRAFile(path).read(LayerNames(transformer, NO_NATIVE_NAMES), type(transformer).__name__)
    others = {layer: one.to(transformer.dtype) for layer, one in updates.items() if isinstance(one, Factors)}
    if len(others) < len(updates):
        mixed = " in some layers: use predict.py" if others else ": diffusers reads it by pipe.load_lora_weights"
        raise UserError(f"{path} is a LoRA{mixed}")
    put_beside(transformer, adapter_name, others)
    transformer.requires_grad_(False)
