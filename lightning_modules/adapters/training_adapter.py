"""A frozen LoRA that a distilled base is trained with, and that nobody needs afterwards."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from datamodules.errors import UserError
from lightning_modules.adapters.adapter import Adapter
from lightning_modules.adapters.applied import AppliedLoRAs
from lightning_modules.adapters.formats.find import find_or_download
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.kinds import kind_of
from lightning_modules.adapters.peft_layers import ADAPTER, activate
from lightning_modules.adapters.rank_mask import NOT_MERGED, read_rank_gate
from lightning_modules.adapters.update import Update
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import DTYPES


class TrainingAdapter:
    """A LoRA that is in the transformer while it trains: pictures, validation and files are without it.

    It has undone the distillation already (https://huggingface.co/ostris/zimage_turbo_training_adapter): what trains
    with it learns the edit alone. It becomes a part of weights in bf16 and float32 that are whole on the device, and
    stays beside those that are quantized, streamed or split.

    Args:
        name: what `find_or_download` finds.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise UserError(f"model.training_adapter={name}: name one LoRA, a file, a folder or owner/name on the hub")
        self.name = name
        self._held: MergedUpdates | LoRABeside | None = None

    @cached_property
    def file(self) -> LoRAFile:
        """Of its weights, which are downloaded if need be."""
        return LoRAFile(find_or_download(self.name))

    def check(self, base: FrozenBase, adapter: Adapter, sharded: bool) -> None:
        """Raise a UserError for what it cannot be trained with, before any weights are read.

        Args:
            adapter: what trains.
            sharded: whether these are split over several GPUs.
        """
        setting = f"model.training_adapter={self.name}"
        if adapter.trains_base:
            raise UserError(f"{setting} does not go with adapter=full: all weights would learn what it does")
        if adapter.reads_base:
            raise UserError(
                f"{setting} changes the base while it trains, whose own weights {adapter} is made of: use adapter=lora"
            )
        self.file.check(LayerNames.of(base), base.name)
        if read_rank_gate(self.file.path) is not None:
            raise UserError(f"{setting}: {NOT_MERGED}; task=export rank=N makes a plain LoRA of it")
        is_dora = any("magnitude" in parts for parts in self.file.parts.values())
        kind = "DoRA" if is_dora else kind_of(self.file.empty.values())
        if self._can_merge(base, base.source.expected_precision, sharded):
            return
        whole = "a base in bf16 or float32 that is whole on its device: without model/quantization, "
        whole += "model.offload.blocks and trainer=fsdp"
        if kind in ("DoRA", "OFT"):
            raise UserError(f"{setting} is {'a' if is_dora else 'an'} {kind}, which needs {whole}")
        if adapter.turns_inputs:
            raise UserError(f"{setting} beside an OFT, which would not turn what it sees, needs {whole}")

    def _can_merge(self, base: FrozenBase, precision: str, sharded: bool) -> bool:
        return precision in DTYPES and not base.source.streamed and not sharded

    def load(self, transformer: Any, base: FrozenBase, sharded: bool) -> None:
        """Put it into a transformer that has the adapter which trains.

        Raises:
            UserError: the file holds no LoRA of this model.
        """
        if self._can_merge(base, base.source.precision, sharded):
            self._held = MergedUpdates(transformer, self.file.read(LayerNames.of(base), base.name))
        else:
            self._held = LoRABeside(transformer, self.file.path, base)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, the transformer is without it, and computes the same bits as if it had never been there."""
        if self._held is None:
            yield
            return
        self._held.leave_out()
        try:
            yield
        finally:
            self._held.put_in()

    def memory(self, base: FrozenBase) -> tuple[int, int]:
        """Bytes that it takes of the device's memory and of the host's."""
        file, names = self.file, LayerNames.of(base)
        if not self._can_merge(base, base.source.expected_precision, sharded=False):
            numbers = (math.prod(file.shapes[key]) for parts in file.parts.values() for key in parts.values())
            return sum(numbers) * base.dtype.itemsize, 0
        layers = dict.fromkeys(layer for one in file.check(names, base.name).values() for layer in one.layers)
        sides = names.sides_of(layers)
        return 0, sum(one.out_features * one.in_features for one in sides) * base.dtype.itemsize


class MergedUpdates:
    """Updates that are a part of a transformer's weights; the originals wait in the host's memory.

    Weights change in place: what was compiled for them, or knows them by their addresses, goes on.

    Args:
        updates: by the names of the layers.
    """

    def __init__(self, transformer: nn.Module, updates: Mapping[str, Update]) -> None:
        self._layers = [(_base_layer(transformer, name), update) for name, update in updates.items()]
        self._originals = [layer.weight.data.to("cpu", copy=True) for layer, _ in self._layers]
        self.put_in()

    @torch.no_grad()
    def put_in(self) -> None:
        """From the original weights, each time by the same products: to the same bits, and those of a resumed run."""
        for layer, update in self._layers:
            weight = layer.weight.data
            with torch.autocast(weight.device.type, enabled=False):  # validation is in it
                weight.copy_(update.updated(weight))

    @torch.no_grad()
    def leave_out(self) -> None:
        """The original weights."""
        for (layer, _), original in zip(self._layers, self._originals, strict=True):
            layer.weight.data.copy_(original)


class LoRABeside:
    """A LoRA in layers of peft's beside those of the adapter that trains, in the base's dtype."""

    def __init__(self, transformer: Any, path: Path, base: FrozenBase) -> None:
        self._transformer = transformer
        self._lora = AppliedLoRAs([path])
        trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        self._lora.load(transformer, base)  # which freezes all
        for parameter in trained:
            parameter.requires_grad_(True)
        self.put_in()

    def put_in(self) -> None:
        """With it from now on."""
        activate(self._transformer, [*self._lora.used, ADAPTER])

    def leave_out(self) -> None:
        """Without it from now on."""
        activate(self._transformer, [ADAPTER])


def _base_layer(transformer: nn.Module, name: str) -> Any:
    """The frozen linear layer of this name."""
    layer: Any = transformer.get_submodule(name)
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
