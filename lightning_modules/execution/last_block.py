"""A transformer's last block, for the tokens of the target alone.

The pipelines cut away what it gives for text and control tokens: there these are needed as keys and values only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class LastBlock:
    """Replaces a block's forward.

    Args:
        block: with its own forward.
        compute: the forward for the target; arguments as the block's, and target and control tokens apart.
        unread: the block's layers that `compute` does without.
    """

    def __init__(
        self, block: nn.Module, compute: Callable[..., tuple[Tensor, Tensor]], unread: tuple[str, ...] = ()
    ) -> None:
        self.full = block.forward
        self.block = block
        self.compute = compute
        self.unread = unread
        self.target_tokens: int | None = None

    def __call__(self, hidden_states: Tensor, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = self.target_tokens
        if count is None:
            return self.full(hidden_states, encoder_hidden_states, *args, **kwargs)
        target, control = hidden_states[:, :count], hidden_states[:, count:]
        return self.compute(self.block, target, control, encoder_hidden_states, *args, **kwargs)


@contextmanager
def target_tokens_only(block: nn.Module, tokens: int) -> Iterator[None]:
    """Inside, a `LastBlock` computes so many tokens, the first of the images'; other blocks compute all."""
    last = block.forward
    if not isinstance(last, LastBlock):
        yield
        return
    last.target_tokens = tokens
    try:
        yield
    finally:
        last.target_tokens = None


def unread_parameters(transformer: nn.Module) -> list[str]:
    """The parameters that a `LastBlock` does not use: they may train and get no gradient, and DDP would wait for it."""
    return [
        f"{at}.{name}"
        for at, block in transformer.named_modules()
        if isinstance(last := block.forward, LastBlock)
        for name, _ in block.named_parameters()
        if name.startswith(tuple(f"{layer}." for layer in last.unread))
    ]
