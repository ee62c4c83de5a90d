"""Activation checkpointing as a dial: what of a block is kept for the backward pass, and what is computed again."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from datamodules.errors import UserError
from lightning_modules.execution.block_offload import blocks
from lightning_modules.execution.last_block import LastBlock, keeping

# By what is computed again, the least first: what `auto` tries. `selective` is all but the products.
POSITIONS = ("none", "selective", "every_2", "full")
# A product that is this much wider than its inner side is quickly made again, as a LoRA's second.
WIDE = 8

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default}
FROZEN_PRODUCT = "retouch::frozen_product"


def read_position(setting: bool | str) -> str:
    """model.gradient_checkpointing as `none`, `selective`, `every_N`, `full` or `auto`; true is full, false none.

    Raises:
        UserError: it is nothing of these.
    """
    if isinstance(setting, bool):
        return "full" if setting else "none"
    if setting in (*POSITIONS, "auto") or re.fullmatch(r"every_[1-9]\d*", str(setting)):
        return setting
    raise UserError(
        f"model.gradient_checkpointing={setting}: choose none, selective, every_2 (or another number), full or auto"
    )


def set_checkpointing(
    transformer: Any, position: str, as_now: Callable[[nn.Module], Callable[..., Any]], compiled: bool = False
) -> None:
    """Let a diffusers model keep what `position` says.

    Args:
        position: of `read_position`, not auto.
        as_now: gives what computes a block later as it would now.
        compiled: whether blocks are; then they keep what torch.compile chooses, about as `selective`.
    """
    if position == "none" or (position == "selective" and compiled):
        transformer.disable_gradient_checkpointing()
        return
    every = int(position.partition("_")[2]) if position.startswith("every_") else 1
    chosen = {block for number, block in enumerate(blocks(transformer).values()) if number % every == 0}
    more: dict[str, Any] = {}
    if position == "selective":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
        more["respect_saved_tensors_hooks"] = True  # by which model.offload.activations works

    def run(block: nn.Module, *args: Any) -> Any:
        if block not in chosen:
            return block(*args)
        again = as_now(block)
        if isinstance(block.forward, LastBlock):
            again = keeping(block.forward, "target_tokens", again)
        return checkpoint(again, *args, use_reentrant=False, **more)

    transformer.enable_gradient_checkpointing(run)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Outputs of matrix products and of attention, by whatever kernel, are kept."""
    keep = operator.name() == FROZEN_PRODUCT or any(word in operator.name() for word in ("attention", "flash_attn"))
    if operator in PRODUCTS:
        inner, outer = args[-1].shape[-2:]
        keep = outer < WIDE * inner
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
