"""Checkpointing policies: what of a block is kept for the backward pass, and what is computed again."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from datamodules.errors import UserError
from lightning_modules.execution.blocks import blocks, with_attribute
from lightning_modules.execution.last_block import LastBlock

# In the order in which `auto` tries them: the least recomputation first. `selective` keeps matrix products alone.
POLICIES = ("none", "selective", "every_2", "full")
# A product that is this much wider than its inner side is quickly made again, as a LoRA's second.
WIDE = 8

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default}
FROZEN_PRODUCT = "retouch::frozen_product"


def read_policy(setting: bool | str) -> str:
    """model.gradient_checkpointing as `none`, `selective`, `every_N`, `full` or `auto`; true is full, false none.

    Raises:
        UserError: it is none of these.
    """
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
    """Let a diffusers model keep what the policy says.

    Args:
        policy: of `read_policy`, not auto.
        bind_rank_mask: gives a function that computes a block later with the rank mask and the signs of now.
        compiled: whether blocks are; then they keep what torch.compile chooses, about as `selective`.
    """
    if policy == "none" or (policy == "selective" and compiled):
        transformer.disable_gradient_checkpointing()
        return
    every = int(policy.partition("_")[2]) if policy.startswith("every_") else 1
    chosen = {block for number, block in enumerate(blocks(transformer).values()) if number % every == 0}
    more: dict[str, Any] = {}
    if policy == "selective":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
        more["respect_saved_tensors_hooks"] = True  # by which model.offload.activations works

    def run(block: nn.Module, *args: Any) -> Any:
        if block not in chosen:
            return block(*args)
        again = bind_rank_mask(block)
        if isinstance(block.forward, LastBlock):
            again = with_attribute(block.forward, "target_tokens", again)
        return checkpoint(again, *args, use_reentrant=False, **more)

    transformer.enable_gradient_checkpointing(run)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Outputs of matrix products and of attention, by whatever kernel, are kept."""
    keep = operator.name() == FROZEN_PRODUCT or any(word in operator.name() for word in ("attention", "flash_attn"))
    if operator in PRODUCTS:
        inner, outer = args[-1].shape[-2:]
        keep = outer < WIDE * inner
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
