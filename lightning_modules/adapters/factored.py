"""What LoKr, LoHa and OFT share: updates of linear layers that are no LoRA, trained in float32 beside frozen ones."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.adapters.factors import Factors
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.linear_updates import LinearUpdates
from lightning_modules.adapters.peft_layers import ADAPTER


class Factored(LinearUpdates):
    """Updates that are no LoRA, in layers of our own.

    Attributes:
        scale: what updates are multiplied by; in a file it is in the weights.
    """

    scale = 1.0

    @abstractmethod
    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Factors:
        """The update of a layer that does nothing yet, in float32 in the host's memory."""

    def put(self, transformer: nn.Module, targets: Sequence[str]) -> None:
        from lightning_modules.adapters.beside import put_beside

        updates: dict[str, Factors] = {}
        generator = torch.Generator().manual_seed(self.seed)
        for name in targets:
            layer: Any = transformer.get_submodule(name)
            updates[name] = self.start(layer.in_features, layer.out_features, generator)
        put_beside(transformer, ADAPTER, updates, self.scale)

    @torch.no_grad()
    def load(self, transformer: nn.Module, names: LayerNames) -> None:
        from lightning_modules.adapters.beside import updated_layers

        layers = updated_layers(transformer, ADAPTER)
        updates = self.read_start(layers, names, type(transformer).__name__)
        for name, layer in layers.items():
            parameters, update = dict(layer.parameters_of(ADAPTER).named_parameters()), updates[name]
            shapes = [{key: one.shape for key, one in each.items()} for each in (parameters, update.tensors())]
            if not isinstance(update, Factors) or update.unwritable or shapes[0] != shapes[1]:
                raise UserError(
                    f"adapter.init_from={self.init_from}: {name} is a {update.kind} of {update.size}, by the settings "
                    f"a {self.kind} of {layer.parameters_of(ADAPTER).update().size}"
                )
            for key, tensor in update.scaled(1 / self.scale).tensors().items():
                parameters[key].copy_(tensor)

    @contextmanager
    def in_dtype(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """As of `Adapter`; the scale is in the weights, as in the file."""
        from lightning_modules.adapters.beside import updated_layers

        layers = updated_layers(part, ADAPTER).values()
        updates = [layer.parameters_of(ADAPTER).whole().scaled(self.scale).to(dtype) for layer in layers]
        with super().in_dtype(part, dtype):
            for layer, update in zip(layers, updates, strict=True):
                layer.parameters_of(ADAPTER).use(update)
                layer.scaling[ADAPTER] = 1.0
            try:
                yield
            finally:
                for layer in layers:
                    layer.scaling[ADAPTER] = self.scale

    def updates(self, transformer: nn.Module) -> dict[str, Factors]:
        from lightning_modules.adapters.beside import updated_layers

        cpu = torch.device("cpu")
        return {
            name: layer.parameters_of(ADAPTER).whole().on(cpu).copy().scaled(self.scale)
            for name, layer in updated_layers(transformer, ADAPTER).items()
        }

    def describe(self, trained: Mapping[str, Tensor]) -> str:
        layers = {name.rpartition(f".updates.{ADAPTER}.")[0] for name in trained}
        count = sum(tensor.numel() for tensor in trained.values())
        return f"{self}: {len(layers)} layers, {count:,} parameters"

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().metadata()}
