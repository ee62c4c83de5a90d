"""LoKr and LoHa: deltas that are not low-rank products, in layers of our own, trained in float32."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from foundation.errors import UserError
from lightning_modules.adapters.delta_adapter import DeltaAdapter
from lightning_modules.adapters.peft_layers import ADAPTER, full_tensor, layer_of
from lightning_modules.lora_files.delta import Delta, LowRank
from lightning_modules.lora_files.kinds import Hadamard, Kronecker
from lightning_modules.lora_files.reading import LoRAFile


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
        self.updates: Any = nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self._active_adapter: list[str] = []

    def set_scale(self, adapter: str, scale: float) -> None:
        """Set an adapter's factor, as in peft's layers; an unknown adapter is ignored."""
        if adapter in self.scaling:
            self.scaling[adapter] = scale

    def forward(self, x: Tensor) -> Tensor:
        if self._disable_adapters:
            return self.base_layer(x)
        layer = self.base_layer
        for name in self._active_adapter:
            if name in self.updates:
                delta, scale = self.updates[name].delta(), self.scaling[name]
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


class Factored(DeltaAdapter):
    """An adapter with deltas of another kind than LoRA, in layers of our own.

    Attributes:
        scale: factor of the deltas; in a file it is part of the weights.
    """

    scale = 1.0

    @abstractmethod
    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Delta:
        """Return a layer's initial delta, which has no effect, in float32 on the CPU."""

    def put(self, transformer: nn.Module, targets: Sequence[str]) -> None:
        deltas: dict[str, Delta] = {}
        generator = torch.Generator().manual_seed(self.seed)
        for name in targets:
            layer: Any = transformer.get_submodule(name)
            deltas[name] = self.start(layer.in_features, layer.out_features, generator)
        add_deltas(transformer, ADAPTER, deltas, self.scale)

    def load(self, layer: DeltaLinear, name: str, delta: Delta, file: LoRAFile) -> None:
        parameters, own = dict(layer.updates[ADAPTER].named_parameters()), layer.updates[ADAPTER].delta()
        shapes = [{key: one.shape for key, one in each.items()} for each in (parameters, delta.tensors())]
        if isinstance(delta, LowRank) or delta.unwritable or shapes[0] != shapes[1]:
            raise UserError(
                f"adapter.init_from={file.path}: {name} is a {delta.kind} of {delta.size}, by the settings "
                f"a {self.kind} of {own.size}"
            )
        for key, tensor in delta.scaled(1 / self.scale).tensors().items():
            parameters[key].copy_(tensor)

    def layers(self, transformer: nn.Module) -> Mapping[str, DeltaLinear]:
        return {
            layer_of(name): module
            for name, module in transformer.named_modules()
            if isinstance(module, DeltaLinear) and ADAPTER in module.updates
        }

    def delta(self, layer: DeltaLinear) -> Delta:
        return layer.updates[ADAPTER].whole()

    def use(self, layer: DeltaLinear, delta: Delta | None) -> None:
        if delta is not None:
            layer.updates[ADAPTER].use(delta)

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, **super().metadata()}


class LoKr(Factored):
    """Deltas kron(w1, w2) of linear layers (arXiv 2309.14859, section 3.2).

    w1 is whole and initialized like PyTorch's linear layers; w2 is a product of two matrices, the second one zero, or
    whole and zero, as in LyCORIS.

    Args:
        rank: rank of w2; from half of w2's larger dimension on, w2 is whole.
        alpha: the delta is scaled by alpha / rank, unless full_matrix is set; None: rank.
        decompose_factor: dimensions of w1, as close as divisors of a layer's own allow; -1: the most even division.
        full_matrix: whether both are whole, whatever the rank.
        settings: arguments of `DeltaAdapter`.
    """

    kind = "LoKr"

    def __init__(
        self, rank: int, alpha: float | None, decompose_factor: int, full_matrix: bool, **settings: Any
    ) -> None:
        super().__init__(**settings)
        if decompose_factor == 0:
            raise UserError("adapter.decompose_factor=0: choose -1 or a positive number")
        self.rank = rank
        self.alpha = rank if alpha is None else alpha
        self.decompose_factor = decompose_factor
        self.full_matrix = full_matrix
        self.scale = 1.0 if full_matrix else self.alpha / rank

    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Kronecker:
        pairs = [factor_pair(size, self.decompose_factor) for size in (out_features, in_features)]
        left, right = zip(*pairs, strict=True)
        first = _like_linear(left, generator)
        # peft's condition: diffusers finds the shapes by it.
        if self.full_matrix or self.rank >= max(right) / 2:
            return Kronecker([first], [torch.zeros(right, device="cpu")])
        rows, columns = right
        zeros = torch.zeros(self.rank, columns, device="cpu")
        return Kronecker([first], [_like_linear((rows, self.rank), generator), zeros])

    def metadata(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("decompose_factor", "full_matrix")}
        return super().metadata() | own | ({} if self.full_matrix else {"rank": self.rank, "alpha": self.alpha})

    def __str__(self) -> str:
        rank = "whole factors" if self.full_matrix else f"rank {self.rank}, alpha {self.alpha:g}"
        return f"LoKr {rank}, factor {self.decompose_factor}"


def _like_linear(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a matrix like the weight of PyTorch's linear layers."""
    return nn.init.kaiming_uniform_(torch.empty(shape, device="cpu"), a=5**0.5, generator=generator)


def factor_pair(size: int, factor: int) -> tuple[int, int]:
    """Return a size as a product (small, large), like peft and LyCORIS; `factor`: the small one, or its upper bound."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = size if factor == -1 else factor
    small = max(one for one in range(1, min(most, int(size**0.5)) + 1) if size % one == 0)
    return small, size // small


class LoHa(Factored):
    """Deltas (w1_a w1_b) * (w2_a w2_b) of linear layers (FedPara, arXiv 2108.06098), of a rank up to rank^2.

    Initialized like LyCORIS: standard deviations of 0.1 and 1 in the first product, zero and 1 in the second.

    Args:
        rank: rank of both products.
        alpha: the delta is scaled by alpha / rank; None: rank.
        settings: arguments of `DeltaAdapter`.
    """

    kind = "LoHa"

    def __init__(self, rank: int, alpha: float | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.rank = rank
        self.alpha = rank if alpha is None else alpha
        self.scale = self.alpha / rank

    def start(self, in_features: int, out_features: int, generator: torch.Generator) -> Hadamard:
        up = 0.1 * torch.randn(out_features, self.rank, generator=generator, device="cpu")
        downs = [torch.randn(self.rank, in_features, generator=generator, device="cpu") for _ in range(2)]
        return Hadamard((up, torch.zeros(out_features, self.rank, device="cpu")), downs)

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"rank": self.rank, "alpha": self.alpha}

    def __str__(self) -> str:
        return f"LoHa rank {self.rank}, alpha {self.alpha:g}"
