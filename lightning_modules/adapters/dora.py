"""DoRA (arXiv 2402.09353): a LoRA beside which the length of each row of the weights trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.adapters.frozen_layers import dequantized, weight_product
from lightning_modules.adapters.lora import LoRA
from lightning_modules.adapters.peft_layers import ADAPTER, full_tensor, lora_layers
from lightning_modules.execution.blocks import without_autocast
from lightning_modules.lora_files.delta import LowRank


class DoRA(LoRA):
    """A LoRA whose rows have trained magnitudes: m (W + s B A) / ||W + s B A||, the norm without gradient.

    peft's own asks layers for their weights in ways that ours do not answer, and makes the whole matrix in every step.
    Arguments are those of `LoRA`; its dropout is that of A's inputs alone.
    """

    is_linear = False
    reads_base = True
    has_magnitudes = True

    def initialize(self, transformer: nn.Module) -> None:
        attach_magnitudes(transformer, ADAPTER)

    def load_magnitude(self, layer: Any, delta: LowRank) -> None:
        """Take over a DoRA's; from a LoRA the norms of its rows, by which it starts as what it was."""
        magnitude = row_norms(layer, ADAPTER) if delta.magnitude is None else delta.magnitude
        layer.lora_magnitude_vector[ADAPTER].weight.copy_(magnitude)

    def deltas(self, transformer: nn.Module) -> dict[str, LowRank]:
        magnitudes = {
            name: full_tensor(layer.lora_magnitude_vector[ADAPTER].weight.detach()).cpu().clone()
            for name, layer in lora_layers(transformer, ADAPTER).items()
        }
        return {name: replace(delta, magnitude=magnitudes[name]) for name, delta in super().deltas(transformer).items()}

    @contextmanager
    def in_dtype(self, part: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """As of `LoRA`; magnitudes stay in float32, as in the file."""
        vectors = [layer.lora_magnitude_vector[ADAPTER] for layer in lora_layers(part, ADAPTER).values()]
        exact = [nn.Parameter(vector.weight.detach(), requires_grad=False) for vector in vectors]
        with super().in_dtype(part, dtype):
            for vector, weight in zip(vectors, exact, strict=True):
                vector.weight = weight
            yield

    def __str__(self) -> str:
        return f"DoRA rank {self.ranks}"


class Magnitude(nn.Module):
    """The lengths m of a layer's rows, by the name that peft has for them.

    Args:
        squares: (out,), of the frozen weight's rows.
        weight: m (out,); None for those of the frozen weight.

    Attributes:
        squares: no parameter, which FSDP would split, and no buffer, which DDP would broadcast.
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
    """Make a DoRA of a LoRA that peft has put into a transformer.

    Args:
        magnitudes: by the names of the layers that have some; None for those of the frozen weights, in all layers.
    """
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
    """What peft's layers ask for their output where an adapter is no plain LoRA."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """x (..., in) and y = W x + b (..., out) -> f (W x + s B A x) + b, with the factors f (out,) of the rows.

        Exactly y where f is 1 and B is 0.
        """
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        update = up(down(module.lora_dropout[active_adapter](x))) * module.scaling[active_adapter]
        bias = module.get_base_layer().bias
        base = result if bias is None else result - bias.to(result.dtype)
        # The difference from 1: rounded to 16 bits, the factor itself would lose most of what was learned.
        change = (row_factors(module, active_adapter) - 1).to(result.dtype)
        return result + update + change * (base + update)


def has_magnitude(layer: Any, adapter_name: str) -> bool:
    """Whether an adapter scales a layer's rows now: at a scale of 0 it is left out."""
    return bool(hasattr(layer, "use_dora") and layer.use_dora.get(adapter_name) and layer.scaling[adapter_name])


def row_factors(layer: Any, adapter_name: str) -> Tensor:
    """m / ||W + s B A|| of each row (out,), in float32; a row of zeros stays one."""
    norms = row_norms(layer, adapter_name)
    return layer.lora_magnitude_vector[adapter_name].weight.float() / norms.where(norms > 0, 1.0)


@torch.no_grad()
def row_norms(layer: Any, adapter_name: str) -> Tensor:
    """||W + s B A|| of each row (out,), in float32 and without gradient (section 4.3).

    By ||W||^2 + 2 s <B, W A^T> + s^2 <B, B A A^T>, row by row: the matrix is never made.
    """
    down, up = (half[adapter_name].weight.detach() for half in (layer.lora_A, layer.lora_B))
    with without_autocast(down.device):
        up = layer.scaling[adapter_name] * up.float()
        crossed = weight_product(layer.get_base_layer(), down).float().t()  # (out, r)
        down = down.float()
        change = (up * (2 * crossed + up @ (down @ down.t()))).sum(dim=1)
    return (layer.lora_magnitude_vector[adapter_name].squares + change).clamp_min(0).sqrt()
