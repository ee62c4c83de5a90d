"""Compiling the blocks of a transformer with torch.compile."""

import itertools
import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_modules.blocks import blocks
from lightning_modules.execution.checkpointing import Recompute, recomputed, recomputed_blocks

log = logging.getLogger("retouch")

# Graphs that a list of blocks may need: by sizes, single samples, padding, and gradients of the inputs.
GRAPHS = 16
# `auto` compiles for at least this many passes per graph. On an H100 five graphs of FLUX Kontext take about a minute
# and save 0.4 s a pass at 512 and at 1024 pixels (docs/speed.md): they are earned back after 150 passes.
EARNED = 60
SECONDS = 12  # for each graph


def expected_graphs(transformer: Any, uniform: bool, forwards: int) -> int:
    """Return about how many graphs a run needs: for each list of blocks, and one more, since inputs have no gradient.

    Args:
        uniform: whether all batches have the same shapes; else single samples and batches have graphs of their own.
        forwards: kinds of passes without gradient.
    """
    lists = {name.rpartition(".")[0] for name in blocks(transformer)}
    return (len(lists) * (1 + forwards) + 1) * (1 if uniform else 2)


def compiles(setting: bool | str, device: torch.device, passes: int, graphs: int) -> bool:
    """Return whether `model.compile=setting` compiles a run of so many passes that needs so many graphs."""
    if setting != "auto":
        return bool(setting)
    # Compiled and eager steps differ in rounding: deterministic runs stay what they were.
    return device.type == "cuda" and passes >= EARNED * graphs and not torch.are_deterministic_algorithms_enabled()


def compile_blocks(transformer: Any, dynamic: bool | None, policy: str, recompute: Recompute) -> None:
    """Compile the blocks, one graph for all that are alike.

    Their forwards are compiled, not their calls: hooks, which stream or gather blocks, stay outside.

    Args:
        dynamic: whether one graph serves all sizes; None compiles one for the first size and another for a second.
        policy: what the graphs recompute, of `recomputed_blocks`.
        recompute: as for `set_checkpointing`, where a block cannot be compiled.
    """
    _log_graphs()
    found = blocks(transformer)
    chosen = set(recomputed_blocks(transformer, policy))
    # Several lists may have one class (Z-Image has three): their graphs differ but count as one function's.
    graphs = len({name.rpartition(".")[0] for name in found}) * GRAPHS
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, graphs)
    # Else a backward graph that cannot be compiled would end the step, after its forward pass.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    Compiled.fails = False
    for block in found.values():
        block.forward = Compiled(block.forward, policy if block in chosen else "none", dynamic, recompute)


@cache
def _log_graphs() -> None:
    """Log each graph that torch.compile builds from now on."""
    began, numbers = time.monotonic(), itertools.count(1)

    def note(*_: Any) -> None:
        log.info(f"compiled graph {next(numbers)}, after {time.monotonic() - began:.0f} s")

    torch._dynamo.callback_handler.register_end_callback(note)


class Compiled:
    """A compiled forward; where compiling fails (no Triton, no C compiler, an old card), the eager one, with one note.

    Args:
        forward: a block's forward, or a compiled one to compile in another way.
        policy, dynamic, recompute: as for `compile_blocks`.
    """

    fails = False  # for all blocks

    def __init__(self, forward: Callable[..., Any], policy: str, dynamic: bool | None, recompute: Recompute) -> None:
        self.own: Callable[..., Any] = forward.own if isinstance(forward, Compiled) else forward
        own, self._policy, self._recompute = self.own, policy, recompute
        again = own if policy == "none" else recomputed(own, policy, compiled=True)

        def run(*args: Any, **kwargs: Any) -> Any:
            return again(*args, **kwargs) if torch.is_grad_enabled() else own(*args, **kwargs)

        self._compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not Compiled.fails:
            try:
                return self._compiled(*map(_restrided, args), **{name: _restrided(one) for name, one in kwargs.items()})
            except Exception as error:
                if (cause := why_not_compiled(error)) is None:
                    raise
                Compiled.fails = True
                log.warning(f"note: steps are slower than possible: the blocks cannot be compiled: {cause}")
        if self._policy == "none" or not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        return self._recompute(self.own, self._policy)(*args, **kwargs)


def _restrided(x: Any) -> Any:
    """Return a single sample with the usual stride of its first dimension: each other one would need a graph."""
    return x[0][None] if isinstance(x, Tensor) and x.ndim and len(x) == 1 else x


def why_not_compiled(error: BaseException) -> str | None:
    """Return the cause of an error of torch.compile; None for other errors."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    text = str(error.__cause__ or error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.endswith("raised:")]
    return lines[0] if lines else type(error).__name__
