"""A linear layer with frozen quantized weights, and the operators that multiply by these.

Their products keep nothing for the backward pass but the quantized weight, and that as saved tensors, so that gradient
checkpointing and offloading can let go of it. bitsandbytes' own layers keep their inputs as well.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.execution.autocast import compute_dtype

# Weights that are quantized at once; a multiple of every block's size.
PIECE = 2**21
# By bytes.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# How weights are put together, by name: each format's file adds its own.
STORAGES: dict[str, Callable[..., "Storage"]] = {}


class Storage:
    """How a frozen weight W (out, in) is put together from parts, and multiplied."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """W."""
        raise NotImplementedError

    def product(self, x: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        """(..., in) -> x W^T (..., out)."""
        return F.linear(x, self.weight(parts, shape, x.dtype))

    def input_gradient(self, grad: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        """(..., out) -> grad W (..., in)."""
        return grad @ self.weight(parts, shape, grad.dtype)


# Operators of their own: torch.compile would make a layer's weight once for both passes and keep it between them, and
# selective recomputation would make it once more.
@torch.library.custom_op("retouch::frozen_product", mutates_args=())
def frozen_product(x: Tensor, parts: list[Tensor], storage: str, out_features: int) -> Tensor:
    """x W^T, differentiable in x; W is made from its parts anew in the backward pass."""
    return _storage(storage).product(x, parts, (out_features, x.shape[-1])).contiguous()


@torch.library.custom_op("retouch::frozen_input_gradient", mutates_args=())
def frozen_input_gradient(grad: Tensor, parts: list[Tensor], storage: str, in_features: int) -> Tensor:
    """grad W."""
    return _storage(storage).input_gradient(grad, parts, (grad.shape[-1], in_features)).contiguous()


@frozen_product.register_fake
def _(x: Tensor, parts: list[Tensor], storage: str, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@frozen_input_gradient.register_fake
def _(grad: Tensor, parts: list[Tensor], storage: str, in_features: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], in_features)


def _keep_parts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, parts, ctx.storage, _ = inputs
    ctx.in_features = x.shape[-1]
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    return frozen_input_gradient(grad, parts, ctx.storage, ctx.in_features), [None] * len(parts), None, None


@torch.library.custom_op("retouch::exact_product", mutates_args=())
def exact_product(x: Tensor, parts: list[Tensor], storage: str, out_features: int) -> Tensor:
    """x W^T of the weight as it is dequantized, whatever kernels there are; it has no gradient."""
    return Storage.product(_storage(storage), x, parts, (out_features, x.shape[-1])).contiguous()


@exact_product.register_fake
def _(x: Tensor, parts: list[Tensor], storage: str, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


frozen_product.register_autograd(_backward, setup_context=_keep_parts)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is put together from parts.

    Args:
        shape: of the weight, (out, in).
        dtype: what adapters beside the layer are made in.
        frozen: its parameters by name, its parts in their order; None for a bias that is not there. All but the bias
            are held as integers of their bits.

    Attributes:
        storage: how: a name of `STORAGES`, then what its constructor takes.
        shardable: whether FSDP can split it.
    """

    storage: str
    shardable = True

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, **frozen: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.compute_dtype = dtype  # by this name peft and diffusers know it
        self._numbers: dict[str, torch.dtype] = {}
        # No buffers: DDP would broadcast them before each forward.
        for name, tensor in frozen.items():
            if tensor is not None and name != "bias":
                self._numbers[name] = tensor.dtype
                # diffusers and transformers cast inputs to the dtype of a layer's weight, or of a model's first number.
                tensor = tensor.view(INTEGERS[tensor.itemsize]) if tensor.is_floating_point() else tensor
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def parts(self) -> list[Tensor]:
        """Return the tensors that the weight is made of."""
        return [getattr(self, name).view(dtype) for name, dtype in self._numbers.items()]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, dtype in self._numbers.items():
            if (key := f"{prefix}{name}") in destination:  # as that of a block in the host's memory is not
                destination[key] = destination[key].view(dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight (out, in)."""
        return _storage(self.storage).weight(self.parts(), (self.out_features, self.in_features), dtype)

    def exact_product(self, x: Tensor) -> Tensor:
        """(..., in) -> x W^T (..., out) in x's dtype, without gradient, of the weight that `dequantize` gives."""
        return exact_product(x, self.parts(), self.storage, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        y = frozen_product(x.to(compute_dtype(x)), self.parts(), self.storage, self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@cache
def _storage(name: str) -> Storage:
    kind, *arguments = name.split()
    return STORAGES[kind](*arguments)


def in_pieces(quantize: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> tuple[Tensor, ...]:
    """Quantize some rows, or for a flat weight some blocks, at a time: kernels take several copies in float32."""
    numbers_in_one = max(1, weight[0].numel())
    pieces = [quantize(piece) for piece in weight.split(max(1, PIECE // numbers_in_one))]
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))
