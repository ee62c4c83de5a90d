"""DoRA (arXiv 2402.09353): a LoRA with trainable norms of the weights' rows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.adapters.lora import LoRA
from lightning_modules.adapters.peft_layers import ADAPTER, full_tensor, lora_layers
from lightning_modules.execution.blocks import without_autocast
from lightning_modules.lora_files.delta import LowRank
from lightning_modules.quantization.linear import QuantizedLinear


class DoRA(LoRA):
    """A LoRA with trainable magnitudes: m (W + s B A) / ||W + s B A||, the norm without gradient.

    peft's own does not support our quantized layers, and computes the whole matrix in every step. Arguments as for
    `LoRA`; dropout is applied to A's inputs only.
    """

    kind = "DoRA"
    starts_from = ("DoRA", "LoRA")
    is_linear = False
    adds_to_outputs = False

    def initialize(self, transformer: nn.Module) -> None:
        attach_magnitudes(transformer, ADAPTER)

    def load_magnitude(self, layer: Any, delta: LowRank) -> None:
        """Copy a DoRA's magnitude; a LoRA starts with the norms of its rows, which change nothing."""
        magnitude = row_norms(layer, ADAPTER) if delta.magnitude is None else delta.magnitude
        layer.lora_magnitude_vector[ADAPTER].weight.copy_(magnitude)

    def deltas(self, transformer: nn.Module) -> dict[str, LowRank]:
        magnitudes = {
            name: full_tensor(layer.lora_magnitude_vector[ADAPTER].weight.detach()).cpu().clone()
            for name, layer in lora_layers(transformer, ADAPTER).items()
        }
        return {name: replace(delta, magnitude=magnitudes[name]) for name, delta in super().deltas(transformer).items()}

    def __str__(self) -> str:
        return f"DoRA rank {self.ranks}"


class Magnitude(nn.Module):
    """The norms m of a layer's rows, under peft's name.

    Args:
        squares: (out,), squared norms of the frozen weight's rows.
        weight: m (out,); None for the norms of the frozen weight.

    Attributes:
        squares: not a parameter, which FSDP would shard, nor a buffer, which DDP would broadcast.
    """

    def __init__(self, squares: Tensor, weight: Tensor | None = None) -> None:
        super().__init__()
        self.squares = squares
        self.weight = nn.Parameter(squares.sqrt() if weight is None else weight.to(squares))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.squares = self.squares.to(fn(self.squares).device)
        return self


def attach_magnitudes(
    transformer: nn.Module, adapter_name: str, magnitudes: Mapping[str, Tensor] | None = None
) -> None:
    """Turn a LoRA of peft into a DoRA with magnitudes by layer; None for the frozen weights' norms in all layers."""
    for name, layer in lora_layers(transformer, adapter_name).items():
        if magnitudes is not None and name not in magnitudes:
            continue
        squares = dequantized(layer.get_base_layer()).square().sum(dim=1)
        given = None if magnitudes is None else magnitudes[name]
        layer.lora_magnitude_vector[adapter_name] = Magnitude(squares, given)
        layer.lora_variant[adapter_name] = WithMagnitude()
        layer.use_dora[adapter_name] = True
        if "lora_magnitude_vector" not in layer.adapter_layer_names:
            layer.adapter_layer_names = (*layer.adapter_layer_names, "lora_magnitude_vector")


class WithMagnitude:
    """The variant of peft's LoRA layers that computes a DoRA."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """x (..., in) and y = W x + b (..., out) -> f (W x + s B A x) + b, f = m / ||W + s B A|| (out,).

        Exactly y if f is 1 and B is 0.
        """
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        update = up(down(module.lora_dropout[active_adapter](x))) * module.scaling[active_adapter]
        bias = module.get_base_layer().bias
        base = result if bias is None else result - bias.to(result.dtype)
        norms = row_norms(module, active_adapter)
        factors = module.lora_magnitude_vector[active_adapter].weight.float() / norms.where(norms > 0, 1.0)
        # The difference from 1: rounded to 16 bits, the factor itself would lose most of the learned change.
        return result + update + (factors - 1).to(result.dtype) * (base + update)


@torch.no_grad()
def row_norms(layer: Any, adapter_name: str) -> Tensor:
    """Return ||W + s B A|| of each row (out,), in float32 and without gradient (section 4.3).

    Computed as ||W||^2 + 2 s <B, W A^T> + s^2 <B, B A A^T>, row by row, without the matrix.
    """
    down, up = (half[adapter_name].weight.detach() for half in (layer.lora_A, layer.lora_B))
    with without_autocast(down.device):
        up = layer.scaling[adapter_name] * up.float()
        crossed = weight_product(layer.get_base_layer(), down).float().t()  # (out, r)
        down = down.float()
        change = (up * (2 * crossed + up @ (down @ down.t()))).sum(dim=1)
    return (layer.lora_magnitude_vector[adapter_name].squares + change).clamp_min(0).sqrt()


def dequantized(layer: Any) -> Tensor:
    """Return a frozen layer's weight (out, in) in float32."""
    if isinstance(layer, QuantizedLinear):
        return layer.dequantize(torch.float32)
    return _plain(layer).float()


def weight_product(layer: Any, rows: Tensor) -> Tensor:
    """(r, in) -> rows W^T (r, out), without bias; rounding no more than the weights themselves."""
    if isinstance(layer, QuantizedLinear):
        return layer.exact_product(rows.to(layer.compute_dtype))
    weight = _plain(layer)
    return torch.mm(rows.to(weight.dtype), weight.t())


def _plain(layer: Any) -> Tensor:
    """Return the weight of a layer that is not quantized by us."""
    if type(layer.weight) is nn.Parameter:  # torch.compile does not trace peft's function
        return layer.weight.detach()
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(layer).detach()
