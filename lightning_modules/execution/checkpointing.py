"""Gradient checkpointing policies: which blocks' activations are kept for the backward pass, and which recomputed."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from foundation.errors import UserError
from lightning_modules.blocks import blocks
from lightning_modules.execution.attention import keep_attention, keep_attention_compiled

# Makes a function keep of a block's forward only what a policy keeps: `Execution.recomputed`.
Recompute = Callable[[Callable[..., Any], str], Callable[..., Any]]
# In the order in which `auto` prefers them: of more recomputation and less memory. Of the blocks that are recomputed,
# all but those of `full` keep attention.
POLICIES = ("none", "every_2", "attention", "full")


def read_policy(setting: bool | str) -> str:
    """Parse `none`, `every_N`, `attention`, `full`, `auto`, or a boolean (full, none); raise a UserError otherwise."""
    if isinstance(setting, bool):
        return "full" if setting else "none"
    if setting in (*POLICIES, "auto") or re.fullmatch(r"every_[1-9]\d*", str(setting)):
        return setting
    raise UserError(
        f"model.gradient_checkpointing={setting}: choose none, every_2 (or another number), attention, full or auto"
    )


def recomputed_blocks(transformer: nn.Module, policy: str) -> list[nn.Module]:
    """Return the blocks that a policy recomputes."""
    every = int(policy.partition("_")[2]) if policy.startswith("every_") else 1
    return [] if policy == "none" else list(blocks(transformer).values())[::every]


def recomputed(run: Callable[..., Any], policy: str, compiled: bool = False, draws: bool = True) -> Callable[..., Any]:
    """Return a function that keeps of a block's forward only its inputs and what the policy keeps.

    Args:
        compiled: whether the function will be part of a compiled graph.
        draws: whether it draws random numbers.
    """
    kept = keep_attention_compiled if compiled else keep_attention
    more = {} if policy == "full" else {"context_fn": kept}
    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=draws, **more)


def set_checkpointing(transformer: Any, policy: str, recompute: Recompute) -> None:
    """Apply a policy to a diffusers model.

    Args:
        policy: as `read_policy` returns it, but not auto.
    """
    chosen = set(recomputed_blocks(transformer, policy))
    if not chosen:
        transformer.disable_gradient_checkpointing()
        return

    def run(block: nn.Module, *args: Any) -> Any:
        if block not in chosen:
            return block(*args)
        return recompute(block, policy)(*args)

    transformer.enable_gradient_checkpointing(run)
