"""The adapters of a transformer of ours and of a stock one."""

import math
from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from peft import LoraConfig

from lightning_modules.adapters.peft_layers import ADAPTER, get_weight, lora_layers


def adapter_state(transformer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapter as a plain LoRA: `LAYER.lora_A.weight` and `LAYER.lora_B.weight`."""
    return {
        f"{name}.{half}.weight": get_weight(getattr(layer, half)[ADAPTER])
        for name, layer in lora_layers(transformer, ADAPTER).items()
        for half in ("lora_A", "lora_B")
    }


def adapt_like(transformer: torch.nn.Module, own: torch.nn.Module) -> None:
    """Give a stock transformer, by peft alone, the adapter of ours (rank 4, alpha 6)."""
    weights = adapter_state(own)
    layers = sorted({name.rpartition(".lora_")[0] for name in weights})
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=layers))
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = weights[name.replace(".default", "")].clone()


def assert_same_gradients(own: torch.nn.Module, stock: torch.nn.Module) -> None:
    """Assert equal gradients of the adapters of two transformers; layers without influence have none, or zeros."""
    ours, theirs = ({n: p.grad for n, p in one.named_parameters() if p.requires_grad} for one in (own, stock))
    assert ours.keys() == theirs.keys()
    for name in ours:
        pair = [gradient for gradient in (ours[name], theirs[name]) if gradient is not None]
        # Norms: a sum of cancelling terms is rounded by more than a share of itself.
        assert len(pair) < 2 or (pair[0] - pair[1]).norm() <= 5e-5 * pair[1].norm() + 1e-6, name
        assert len(pair) == 2 or all((gradient == 0).all() for gradient in pair), name


def stock_shift(stock: Any, latents: torch.Tensor, patch: int = 2) -> float:
    """Return the timestep shift of the pipelines' own function for a target of these latents (B, C, h, w)."""
    config = stock.scheduler.config
    *_, height, width = latents.shape
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return math.exp(calculate_shift(height * width // patch**2, *(config[name] for name in names)))
