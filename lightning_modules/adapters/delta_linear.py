"""Linear layers that add trainable deltas of other kinds than LoRA to frozen layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lightning_modules.adapters.peft_layers import full_tensor, layer_of
from lightning_modules.lora_files.delta import Delta


class DeltaParameters(nn.Module):
    """The tensors of a delta, by their names, as parameters.

    Args:
        delta: their initial values.
    """

    def __init__(self, delta: Delta) -> None:
        super().__init__()
        tensors = delta.tensors()
        self._empty = delta.like({name: torch.empty(one.shape, device="meta") for name, one in tensors.items()})
        self.names = list(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def delta(self) -> Delta:
        """Return the delta with its current values and gradients."""
        return self._empty.like({name: getattr(self, name) for name in self.names})

    def whole(self) -> Delta:
        """Return the delta without gradients; all processes take part if parameters are split over them."""
        return self._empty.like({name: full_tensor(getattr(self, name).detach()) for name in self.names})

    def use(self, delta: Delta) -> None:
        """Compute with another delta; the trained parameters stay unchanged."""
        for name, tensor in delta.tensors().items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))


class DeltaLinear(nn.Module, BaseTunerLayer):
    """A linear layer, or peft's LoRA layer around one, with deltas by the names of their adapters.

    peft's own layers of these kinds take their shapes from the weight, which is packed in 4 bits, and compute a matrix
    of its size in each step.

    Attributes:
        updates: a `DeltaParameters` per adapter.
        scaling: the factor of each delta.
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
        """Set an adapter's factor, as in peft's layers; an unknown adapter is ignored."""
        if adapter in self.scaling:
            self.scaling[adapter] = scale

    def parameters_of(self, adapter: str) -> DeltaParameters:
        """Return an adapter's parameters."""
        found = self.updates[adapter]
        assert isinstance(found, DeltaParameters)
        return found

    def forward(self, x: Tensor) -> Tensor:
        if self._disable_adapters:
            return self.base_layer(x)
        layer = self.base_layer
        for name in self._active_adapter:
            if name in self.updates:
                delta, scale = self.parameters_of(name).delta(), self.scaling[name]
                layer = partial((delta if scale == 1 else delta.scaled(scale)).forward, layer)
        return layer(x)


def add_deltas(transformer: nn.Module, name: str, deltas: Mapping[str, Delta], scale: float = 1.0) -> None:
    """Add an adapter's deltas, by layer, on the devices of the layers' weights, and activate them."""
    for at, delta in deltas.items():
        layer: Any = transformer.get_submodule(at)
        if not isinstance(layer, DeltaLinear):
            layer = DeltaLinear(layer)
            transformer.set_submodule(at, layer)
        device = layer.get_base_layer().weight.device
        layer.updates[name] = DeltaParameters(delta).to(device)
        layer.scaling[name] = scale
        layer._active_adapter = [*layer._active_adapter, name]


def delta_layers(transformer: nn.Module, adapter_name: str) -> dict[str, DeltaLinear]:
    """Return the layers that have an adapter's deltas, by name."""
    return {
        layer_of(name): module
        for name, module in transformer.named_modules()
        if isinstance(module, DeltaLinear) and adapter_name in module.updates
    }
