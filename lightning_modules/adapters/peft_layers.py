"""peft's LoRA layers: the one file that knows how they are made and what is in them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# The name that an adapter in training goes by.
ADAPTER = "default"


def add_adapter(
    transformer: Any, rank: int, alpha: float, dropout: float, targets: list[str] | str, init: bool | str
) -> None:
    """Put LoRA layers beside a transformer's target layers; arguments are those of peft's LoraConfig."""
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, init_lora_weights=init)
    transformer.add_adapter(config, adapter_name=ADAPTER)


def matching(targets: list[str] | str, names: Iterable[str]) -> list[str]:
    """The layers, by their full names, that peft takes as targets; raises re.error for no regular expression."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=targets)
    return [name for name in names if check_target_module_exists(config, name)]


def lora_layers(transformer: nn.Module, adapter_name: str | None = None) -> dict[str, Any]:
    """peft's layers that hold an adapter, or any adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {
        name: module
        for name, module in transformer.named_modules()
        if isinstance(module, LoraLayer) and (adapter_name is None or adapter_name in module.lora_A)
    }


def activate(transformer: nn.Module, adapter_names: Sequence[str]) -> None:
    """Compute with these adapters alone, and leave as it is what of them trains."""
    for layer in lora_layers(transformer).values():
        layer._active_adapter = list(adapter_names)  # peft's set_adapter would let them all train, or none


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
