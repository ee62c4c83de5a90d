"""Updates that are no LoRA, computed beside frozen layers of a transformer."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lightning_modules.adapters.factors import Factors
from lightning_modules.adapters.peft_layers import full_tensor, layer_of


class Parameters(nn.Module):
    """The tensors of an update, by their names, as parameters.

    Args:
        update: their values.
    """

    def __init__(self, update: Factors) -> None:
        super().__init__()
        tensors = update.tensors()
        self._empty = update.like({name: torch.empty(one.shape, device="meta") for name, one in tensors.items()})
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def update(self) -> Factors:
        """As they are now."""
        return self._empty.like({name: getattr(self, name) for name in self.names})

    def whole(self) -> Factors:
        """The same without gradients, of parameters that may be split over processes; all of them take part."""
        return self._empty.like({name: full_tensor(getattr(self, name).detach()) for name in self.names})

    def use(self, update: Factors) -> None:
        """Compute with this one from now on, and leave alone what trains."""
        for name, tensor in update.tensors().items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))


class UpdatedLinear(nn.Module, BaseTunerLayer):
    """A linear layer, or peft's LoRA layer around one, and updates of it by the names of their adapters.

    peft's own layers of these kinds take their shapes from the weight, which is packed in 4 bits, and make a matrix of
    its size in each step.

    Attributes:
        updates: a `Parameters` for each adapter.
        scaling: what each is multiplied by.
    """

    adapter_layer_names = ("updates",)
    other_param_names = ("scaling",)

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.updates = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self._active_adapter: list[str] = []

    def set_scale(self, adapter: str, scale: float) -> None:
        """As peft's layers have it; a name of an adapter that is elsewhere says nothing."""
        if adapter in self.scaling:
            self.scaling[adapter] = scale

    def parameters_of(self, adapter: str) -> Parameters:
        """Those of an adapter."""
        found = self.updates[adapter]
        assert isinstance(found, Parameters)
        return found

    def forward(self, x: Tensor) -> Tensor:
        if self._disable_adapters:
            return self.base_layer(x)
        layer = self.base_layer
        for name in self._active_adapter:
            if name in self.updates:
                update, scale = self.parameters_of(name).update(), self.scaling[name]
                layer = partial((update if scale == 1 else update.scaled(scale)).beside, layer)
        return layer(x)


def put_beside(transformer: nn.Module, name: str, updates: Mapping[str, Factors], scale: float = 1.0) -> None:
    """Put an adapter's updates beside layers, where their weights are, and let them be computed.

    Args:
        name: of the adapter.
        updates: by the names of the layers.
        scale: what they are multiplied by.
    """
    for at, update in updates.items():
        layer: Any = transformer.get_submodule(at)
        if not isinstance(layer, UpdatedLinear):
            layer = UpdatedLinear(layer)
            transformer.set_submodule(at, layer)
        device = layer.get_base_layer().weight.device
        layer.updates[name] = Parameters(update).to(device)
        layer.scaling[name] = scale
        layer._active_adapter = [*layer._active_adapter, name]


def updated_layers(transformer: nn.Module, adapter_name: str) -> dict[str, UpdatedLinear]:
    """The layers that have an adapter's updates, by name."""
    return {
        layer_of(name): module
        for name, module in transformer.named_modules()
        if isinstance(module, UpdatedLinear) and adapter_name in module.updates
    }
