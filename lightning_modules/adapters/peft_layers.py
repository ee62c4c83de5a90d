"""peft's LoRA layers: the only file that depends on their construction and content."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_modules.adapters.targets import Ranks

# Name of the adapter that trains.
ADAPTER = "default"


def add_adapter(transformer: Any, ranks: Ranks, dropout: float, targets: Sequence[str], init: bool | str) -> None:
    """Add LoRA layers to a transformer's target layers, named in full; `init` as in peft's LoraConfig."""
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
    """Return a regular expression for exactly these names: for peft, `proj_out` is an ending."""
    return f"({'|'.join(map(re.escape, names))})"


def _other_than(usual: float, values: Mapping[str, float]) -> dict[str, Any]:
    """Return peft's pattern for each value that differs from the usual one."""
    others = dict.fromkeys(value for value in values.values() if value != usual)
    return {f"^{_exactly(name for name, one in values.items() if one == value)}": value for value in others}


def layer_of(name: str) -> str:
    """Return the adapted layer of an adapter's module or parameter; adapters may be nested."""
    return re.split(r"\.(?:lora_|updates\.|base_layer)", name)[0]


def lora_layers(transformer: nn.Module, adapter_name: str | None = None) -> dict[str, Any]:
    """Return peft's layers with an adapter, or with any adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {
        layer_of(name): module
        for name, module in transformer.named_modules()
        if isinstance(module, LoraLayer) and (adapter_name is None or adapter_name in module.lora_A)
    }


def _tuner_layers(transformer: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


def enable(transformer: nn.Module, on: bool) -> None:
    """Compute with the active adapters, or without any."""
    for layer in _tuner_layers(transformer):
        layer.enable_adapters(on)


def activate(transformer: nn.Module, adapter_names: Sequence[str]) -> None:
    """Compute with these adapters only, without changing which parameters train."""
    for layer in _tuner_layers(transformer):
        layer._active_adapter = list(adapter_names)  # peft's set_adapter would make all of them train, or none


@contextmanager
def without_adapters(transformer: nn.Module, adapter_names: Sequence[str] = (ADAPTER,)) -> Iterator[None]:
    """Temporarily compute without some adapters, by default without the one that trains."""
    layers = _tuner_layers(transformer)
    active = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [name for name in layer.active_adapters if name not in adapter_names]
    try:
        yield
    finally:
        for layer, names in zip(layers, active, strict=True):
            layer._active_adapter = names


def remove_adapters(transformer: Any) -> None:
    """Put the layers of the base back in place of all adapter layers around them."""
    for name, layer in list(transformer.named_modules()):
        if hasattr(layer, "get_base_layer") and not re.search(r"\.base_layer\b", name):
            transformer.set_submodule(name, layer.get_base_layer())
    transformer.unload_lora()


def cast_inputs(transformer: nn.Module, on: bool) -> None:
    """Set whether peft casts a layer's input to the dtype of the adapter's weights."""
    for layer in lora_layers(transformer, ADAPTER).values():
        layer.cast_input_dtype_enabled = on


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded as a whole; all processes take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_weight(half: Any) -> Tensor:
    return half.weight.detach() if isinstance(half, nn.Linear) else half.lora_weight().detach()


def used_weight(half: Any) -> Tensor:
    """Return the matrix that a projection computes with, with its gradient."""
    return half.weight if isinstance(half, nn.Linear) else half.used_weight()


def use_weight(half: Any, weight: Tensor | None) -> None:
    """Compute with this matrix, without changing the trainable one; None ends it for other modules than linear ones."""
    if not isinstance(half, nn.Linear):
        half.inference_weight = weight
    elif weight is not None:
        half.weight = nn.Parameter(weight, requires_grad=False)


def set_weight(half: Any, weight: Tensor) -> None:
    """Copy a matrix into a projection."""
    if isinstance(half, nn.Linear):
        half.weight.copy_(weight)
    else:
        half.load_lora_weight(weight)
