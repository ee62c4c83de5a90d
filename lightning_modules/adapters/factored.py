"""What LoKr, LoHa and OFT share: updates of linear layers that are no LoRA, trained in float32 beside frozen ones."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.errors import UserError
from lightning_modules.adapters.factors import Factors
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.linear_updates import LinearUpdates
from lightning_modules.adapters.peft_layers import ADAPTER
from lightning_modules.layers import ALIKE, Layers


class Factored(LinearUpdates):
    """Updates that are no LoRA, in layers of our own.

    Attributes:
        scale: what updates are multiplied by; in a file it is in the weights.
    """

    scale = 1.0

    @abstractmethod
    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Factors:
        """The update of a layer that does nothing yet, in float32 in the host's memory."""

    def inject(self, transformer: nn.Module, layers: Layers = ALIKE) -> None:
        """Freeze the transformer and put trainable updates beside its targets.

        The initial weights are a function of the seed, whatever the device.

        Raises:
            UserError: target_modules matches nothing, or init_from fits another model.
        """
        from lightning_modules.adapters.beside import put_beside

        transformer.requires_grad_(False)
        if self.target_modules is None:
            self.target_modules = list(layers.targets)
        updates: dict[str, Factors] = {}
        generator = torch.Generator().manual_seed(self.seed)
        with torch.device("cpu"):
            for name in self.resolve_targets(transformer, layers):
                layer: Any = transformer.get_submodule(name)
                updates[name] = self.start(layer.in_features, layer.out_features, generator)
        if self.init_from is not None:
            names = LayerNames(transformer, layers.native)
            updates = self._read(updates, names, type(transformer).__name__)
        put_beside(transformer, ADAPTER, updates, self.scale)
        transformer.train()

    def _read(self, started: Mapping[str, Factors], names: LayerNames, transformer: str) -> dict[str, Factors]:
        """A file's updates in place of those that are new; their scale may have been another.

        Raises:
            UserError: layers or shapes differ.
        """
        updates, found = self.read_start(started, names, transformer), {}
        for name, own in started.items():
            update = updates[name]
            shapes = [{key: one.shape for key, one in each.tensors().items()} for each in (own, update)]
            if not isinstance(update, Factors) or update.unwritable or shapes[0] != shapes[1]:
                raise UserError(
                    f"adapter.init_from={self.init_from}: {name} is a {update.kind} of {update.size}, by the settings "
                    f"a {self.kind} of {own.size}"
                )
            found[name] = update.scaled(1 / self.scale)
        return found

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
