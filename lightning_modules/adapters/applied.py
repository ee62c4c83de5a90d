"""LoRAs as a part of the weights that they adapt."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from datamodules.errors import UserError
from lightning_modules.adapters.lora import lora_layers


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
