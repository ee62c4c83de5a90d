"""Gradient checkpointing policies: which outputs of a block are kept for the backward pass, and which recomputed."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from datamodules.errors import UserError
from lightning_modules.execution.blocks import LastBlock, blocks, with_attribute

# `selective` keeps only matrix products and attention.
POLICIES = ("none", "selective", "every_2", "full")
# In the order in which `auto` prefers them. On an H100 `every_2` took less time and memory than `selective`.
AUTO = ("none", "every_2", "full")
# A product this many times wider than its inner dimension, such as a LoRA's second, is cheap to recompute.
WIDE = 8

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default}
FROZEN_PRODUCT = "retouch::frozen_product"


def read_policy(setting: bool | str) -> str:
    """Parse `none`, `selective`, `every_N`, `full`, `auto`, or a boolean (full, none); raise a UserError otherwise."""
    if isinstance(setting, bool):
        return "full" if setting else "none"
    if setting in (*POLICIES, "auto") or re.fullmatch(r"every_[1-9]\d*", str(setting)):
        return setting
    raise UserError(
        f"model.gradient_checkpointing={setting}: choose none, selective, every_2 (or another number), full or auto"
    )


def set_checkpointing(
    transformer: Any, policy: str, bind_rank_mask: Callable[[nn.Module], Callable[..., Any]], compiled: bool = False
) -> None:
    """Apply a policy to a diffusers model.

    Args:
        policy: as `read_policy` returns it, but not auto.
        bind_rank_mask: returns a function that recomputes a block later with the present rank mask and signs.
        compiled: whether the blocks are; then torch.compile chooses what they keep, about as `selective`.
    """
    if policy == "none" or (policy == "selective" and compiled):
        transformer.disable_gradient_checkpointing()
        return
    every = int(policy.partition("_")[2]) if policy.startswith("every_") else 1
    chosen = set(list(blocks(transformer).values())[::every])
    more: dict[str, Any] = {}
    if policy == "selective":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
        more["respect_saved_tensors_hooks"] = True  # model.offload.activations relies on them

    def run(block: nn.Module, *args: Any) -> Any:
        if block not in chosen:
            return block(*args)
        again = bind_rank_mask(block)
        if isinstance(block.forward, LastBlock):
            again = with_attribute(block.forward, "target_tokens", again)
        return checkpoint(again, *args, use_reentrant=False, **more)

    transformer.enable_gradient_checkpointing(run)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of matrix products and of attention, whatever the kernel."""
    keep = operator.name() == FROZEN_PRODUCT or any(word in operator.name() for word in ("attention", "flash_attn"))
    if operator in PRODUCTS:
        inner, outer = args[-1].shape[-2:]
        keep = outer < WIDE * inner
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
