"""peft's LoRA layers: the one file that knows how they are made and what is in them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_modules.adapters.ranks import Ranks
from lightning_modules.lora_files.delta import Delta, LowRank

# The name that an adapter in training goes by.
ADAPTER = "default"


def add_adapter(transformer: Any, ranks: Ranks, dropout: float, targets: Sequence[str], init: bool | str) -> None:
    """Put LoRA layers beside a transformer's target layers, named in full; `init` is as in peft's LoraConfig."""
    from peft import LoraConfig

    config = LoraConfig(
        r=ranks.rank,
        lora_alpha=ranks.alpha,
        use_rslora=ranks.use_rslora,
        rank_pattern=_other_than(ranks.rank, {name: ranks.rank_of(name) for name in targets}),
        alpha_pattern=_other_than(ranks.alpha, {name: ranks.alpha_of(name) for name in targets}),
        lora_dropout=dropout,
        target_modules=_exactly(targets),
        init_lora_weights=init,
    )
    transformer.add_adapter(config, adapter_name=ADAPTER)


def _exactly(names: Iterable[str]) -> str:
    """A regular expression for these names: peft takes `proj_out` for all layers that end so."""
    return f"({'|'.join(map(re.escape, names))})"


def _other_than(usual: float, values: Mapping[str, float]) -> dict[str, Any]:
    """A pattern of peft's for each value of layers that is not the usual one."""
    others = dict.fromkeys(value for value in values.values() if value != usual)
    return {f"^{_exactly(name for name, one in values.items() if one == value)}": value for value in others}


def layer_of(name: str) -> str:
    """The adapted layer of a module or parameter beside it: adapters may stand around one another."""
    return re.split(r"\.(?:lora_|updates\.|base_layer)", name)[0]


def lora_layers(transformer: nn.Module, adapter_name: str | None = None) -> dict[str, Any]:
    """peft's layers that hold an adapter, or any adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {
        layer_of(name): module
        for name, module in transformer.named_modules()
        if isinstance(module, LoraLayer) and (adapter_name is None or adapter_name in module.lora_A)
    }


def adapted_layers(transformer: nn.Module, adapter_name: str) -> list[Any]:
    """The layers that hold an adapter, of any kind."""
    return [layer for layer in _tuner_layers(transformer) if adapter_name in layer._get_available_adapters()]


def _tuner_layers(transformer: nn.Module) -> list[Any]:
    """Those of peft and ours that stand around another layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


def delta_of(layer: Any, adapter_name: str) -> Delta:
    """Return the delta that an adapter computes in one of `adapted_layers`."""
    if hasattr(layer, "lora_A"):
        down, up = (half[adapter_name].weight.detach().float() for half in (layer.lora_A, layer.lora_B))
        return LowRank(down, up).scaled(layer.scaling[adapter_name])
    return layer.parameters_of(adapter_name).whole().scaled(layer.scaling[adapter_name])


def enable(transformer: nn.Module, on: bool) -> None:
    """Compute with adapters, those that are active, or without."""
    for layer in _tuner_layers(transformer):
        layer.enable_adapters(on)


def activate(transformer: nn.Module, adapter_names: Sequence[str]) -> None:
    """Compute with these adapters alone, and leave as it is what of them trains."""
    for layer in _tuner_layers(transformer):
        layer._active_adapter = list(adapter_names)  # peft's set_adapter would let them all train, or none


@contextmanager
def without_adapter(transformer: nn.Module) -> Iterator[None]:
    """Inside, compute without the adapter that trains; others that are beside it stay."""
    layers = _tuner_layers(transformer)
    active = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [name for name in layer.active_adapters if name != ADAPTER]
    try:
        yield
    finally:
        for layer, names in zip(layers, active, strict=True):
            layer._active_adapter = names


def cast_inputs(transformer: nn.Module, on: bool) -> None:
    """Whether peft casts a layer's input to the dtype of the adapter's weights."""
    for layer in lora_layers(transformer, ADAPTER).values():
        layer.cast_input_dtype_enabled = on


@torch.no_grad()
def adapter_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter as a plain LoRA: `LAYER.lora_A.weight` and `LAYER.lora_B.weight`."""
    return {
        f"{name}.{half}.weight": full_tensor(get_weight(getattr(layer, half)[ADAPTER]))
        for name, layer in lora_layers(transformer, ADAPTER).items()
        for half in ("lora_A", "lora_B")
    }


def adapter_tensors(transformer: nn.Module) -> dict[str, Tensor]:
    """All tensors of the adapter, by their names in the transformer: what a checkpoint holds."""
    return {name: tensor for name, tensor in transformer.state_dict().items() if f".{ADAPTER}." in name}


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that may be split over processes; all of them take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_weight(half: Any) -> Tensor:
    """A projection's matrix, which may be split over processes."""
    return half.weight.detach() if isinstance(half, nn.Linear) else half.lora_weight().detach()


def use_weight(half: Any, weight: Tensor) -> None:
    """Compute with this matrix, and leave alone what trains."""
    if isinstance(half, nn.Linear):
        half.weight = nn.Parameter(weight, requires_grad=False)
    else:
        half.inference_weight = weight


def set_weight(half: Any, weight: Tensor) -> None:
    """Take over a matrix."""
    if isinstance(half, nn.Linear):
        half.weight.copy_(weight)
    else:
        half.load_lora_weight(weight)
