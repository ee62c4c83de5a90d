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
        compute: the forward for the target; arguments as the block's, and the tokens of target, controls and text
            apart, in this order. Where the block gets and gives text and images as one, so does it.
        unread: the block's layers that `compute` does without.
    """

    def __init__(self, block: nn.Module, compute: Callable[..., Any], unread: tuple[str, ...] = ()) -> None:
        self.full = block.forward
        self.block = block
        self.compute = compute
        self.unread = unread
        self.target_tokens: slice | None = None

    def __call__(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        at = self.target_tokens
        if at is None:
            return self.full(hidden_states, encoder_hidden_states, *args, **kwargs)
        before, target, control = hidden_states.tensor_split((at.start, at.stop), dim=1)
        text = before if encoder_hidden_states is None else encoder_hidden_states
        return self.compute(self.block, target, control, text, *args, **kwargs)


@contextmanager
def target_tokens_only(block: nn.Module, tokens: int, text_tokens: int = 0) -> Iterator[None]:
    """Inside, a `LastBlock` computes so many tokens, the first of the images'; other blocks compute all.

    Args:
        text_tokens: how many of text come before these in the block's `hidden_states`.
    """
    last = block.forward
    if not isinstance(last, LastBlock):
        yield
        return
    last.target_tokens = slice(text_tokens, text_tokens + tokens)
    try:
        yield
    finally:
        last.target_tokens = None


def ignored_by_ddp(module: nn.Module) -> list[str]:
    """The parameters of an `EditModule` that DDP leaves alone.

    What never changes is the same in all processes, and float8 does not travel by gloo. What a `LastBlock` does not use
    may train and gets no gradient, for which DDP would wait.
    """
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return frozen + [
        f"{at}.{name}"
        for at, block in module.named_modules()
        if isinstance(last := block.forward, LastBlock)
        for name, _ in block.named_parameters()
        if name.startswith(tuple(f"{layer}." for layer in last.unread))
    ]
