"""Linear layers with frozen quantized weights: fp8 here, 4 and 8 bits by bitsandbytes' kernels.

Their products keep nothing for the backward pass but the quantized weight, and that as saved tensors, so that gradient
checkpointing and offloading can let go of it. bitsandbytes' own layers keep their inputs as well.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_modules.execution.autocast import compute_dtype
from lightning_modules.quantization.fp8 import (
    E4M3,
    E5M2,
    has_tensor_cores,
    quantize_rows,
    row_scale,
    scaled_product,
    to_float8,
)

# Weights that are quantized at once; a multiple of every block's size.
PIECE = 2**21
# Tensor cores take matrices whose sides are multiples of it.
TILE = 16


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


frozen_product.register_autograd(_backward, setup_context=_keep_parts)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is put together from parts.

    Attributes:
        storage: how: a name of `STORAGES`, then what its constructor takes.
    """

    storage: str

    def parts(self) -> list[Tensor]:
        """The tensors that the weight is made of."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight (out, in)."""
        return _storage(self.storage).weight(self.parts(), (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = frozen_product(x.to(compute_dtype(x)), self.parts(), self.storage, self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Float8(Storage):
    """A float8 weight and its scale (out, 1), or (1, 1) for all, multiplied on fp8 tensor cores where there are any.

    Args:
        gradient_dtype: float8_e5m2 quantizes gradients for tensor cores; any other multiplies them in their own dtype.
    """

    def __init__(self, gradient_dtype: str) -> None:
        self.gradient_dtype = getattr(torch, gradient_dtype)

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, scale = parts
        return weight.to(dtype).mul_(scale)

    def product(self, x: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        weight, scale = parts
        out_features, in_features = shape
        if not _on_tensor_cores(x, weight, E4M3):
            return super().product(x, parts, shape)
        rows, row_scales = quantize_rows(x.reshape(-1, in_features), E4M3)
        # Both scaled by rows: the second matrix is weight^T, column by column.
        column_scales = scale.expand(out_features, 1).reshape(1, -1).contiguous()
        y = scaled_product(rows, row_scales, weight.t(), column_scales)
        return y.view(*x.shape[:-1], out_features).to(x.dtype)

    def input_gradient(self, grad: Tensor, parts: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
        weight, scale = parts
        out_features, in_features = shape
        if self.gradient_dtype != E5M2 or not _on_tensor_cores(grad, weight, E5M2):
            return super().input_gradient(grad, parts, shape)
        # The weight's scales are along the sum: they go into the gradient.
        rows, row_scales = quantize_rows(grad.reshape(-1, out_features) * scale.to(grad.dtype).t(), E5M2)
        ones = torch.ones(1, in_features, device=grad.device)
        # Hopper's tensor cores want the second matrix column by column: a copy of one layer's bytes.
        columns = weight.t().contiguous().t()
        x = scaled_product(rows, row_scales, columns, ones)
        return x.view(*grad.shape[:-1], in_features).to(grad.dtype)


def _on_tensor_cores(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    whole = weight.shape[0] % TILE == 0 and weight.shape[1] % TILE == 0
    return whole and weight.dtype == E4M3 and has_tensor_cores(x.device, dtype)


class Fp8Linear(QuantizedLinear):
    """Weights in float8 with scales (arXiv 2209.05433).

    Args:
        weight: (out, in), float8.
        scale: (out, 1), or (1, 1) for all; the weight is weight * scale.
        dtype: what adapters beside the layer are made in.
        gradient_dtype: of `Float8`.
    """

    weight_scale: Tensor

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        # The bias first: diffusers takes the first floating parameter for the dtype of a model.
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
        # No buffer: DDP would broadcast it before each forward.
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.compute_dtype = dtype  # by this name peft knows it
        self.gradient_dtype = gradient_dtype
        self.storage = f"fp8 {gradient_dtype}".replace("torch.", "")

    @classmethod
    def quantize(cls, linear: nn.Linear, gradient_dtype: torch.dtype) -> "Fp8Linear":
        """Per-row scales that are powers of two: they cost no precision, and multiplying by them is exact."""

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            mantissa, exponent = torch.frexp(row_scale(rows, E4M3))
            scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
            return to_float8(rows, scale, E4M3), scale

        weight, scale = in_pieces(quantize, linear.weight)
        return cls(weight, scale, linear.bias, linear.weight.dtype, gradient_dtype)

    def parts(self) -> list[Tensor]:
        return [self.weight, self.weight_scale]


def in_pieces(quantize: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> tuple[Tensor, ...]:
    """Quantize some rows, or for a flat weight some blocks, at a time: kernels take several copies in float32."""
    numbers_in_one = max(1, weight[0].numel())
    pieces = [quantize(piece) for piece in weight.split(max(1, PIECE // numbers_in_one))]
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


class FourBit(Storage):
    """Two weights in each uint8, and the scales of their blocks; by bitsandbytes' kernels.

    With double quantization the scales are in 8 bits themselves, and there are four parts more: their offset, their own
    scales, and the numbers that 8 bits stand for.

    Args:
        quant_type: `fp4` or `nf4`.
        blocksize, nested_blocksize: weights, and scales, that share a scale.
        dtype: what weights are made in.
    """

    def __init__(self, quant_type: str, blocksize: str, nested_blocksize: str, dtype: str) -> None:
        self.quant_type = quant_type
        self.blocksize, self.nested_blocksize = int(blocksize), int(nested_blocksize)
        self.dtype = getattr(torch, dtype)

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        packed, absmax, *nested = parts
        if nested:
            offset, absmax2, code = nested
            absmax = bnb.functional.dequantize_blockwise(absmax, None, absmax2, code, None, self.nested_blocksize)
            absmax = absmax + offset
        kernel = torch.ops.bitsandbytes.dequantize_4bit.default
        return kernel(packed, absmax.float(), self.blocksize, self.quant_type, shape, self.dtype).to(dtype)


class FourBitLinear(QuantizedLinear):
    """fp4 or nf4 (arXiv 2305.14314), a scale for each block of 64 weights.

    Args:
        packed: uint8, two weights in each.
        quant_state: the scales, themselves in 8 bits with double quantization, and the shape.
        dtype: what adapters beside the layer are made in.
    """

    def __init__(
        self, packed: Tensor, quant_state: bnb.functional.QuantState, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = quant_state.shape
        self.quant_state = quant_state
        self._hold(packed)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
        self.compute_dtype = dtype
        nested = quant_state.state2.blocksize if quant_state.nested else 0
        made_in = str(quant_state.dtype).removeprefix("torch.")
        self.storage = f"{quant_state.quant_type} {quant_state.blocksize} {nested} {made_in}"

    @classmethod
    def quantize(cls, linear: nn.Linear, quant_type: str, double_quant: bool) -> "FourBitLinear":
        """By the kernel for the weight's device; bit for bit what `bitsandbytes.functional.quantize_4bit` gives."""
        weight, dtype = linear.weight.data, linear.weight.dtype
        states: list[bnb.functional.QuantState] = []

        def quantize(piece: Tensor) -> tuple[Tensor, Tensor]:
            packed, state = bnb.functional.quantize_4bit(piece, quant_type=quant_type)
            states.append(state)
            return packed, state.absmax

        packed, absmax = in_pieces(quantize, weight.flatten())
        settings = {name: getattr(states[0], name) for name in ("code", "blocksize", "quant_type")}
        if double_quant:
            offset = absmax.mean()
            absmax, nested = bnb.functional.quantize_blockwise(absmax - offset, blocksize=256)
            settings |= {"offset": offset, "state2": nested}
        state = bnb.functional.QuantState(absmax=absmax, shape=weight.shape, dtype=dtype, **settings)
        return cls(packed, state, linear.bias, dtype)

    def parts(self) -> list[Tensor]:
        state = self.quant_state
        parts = [self.weight.data, state.absmax]
        return [*parts, state.offset, state.state2.absmax, state.state2.code] if state.nested else parts

    def _hold(self, packed: Tensor) -> None:
        # diffusers knows the true shape of weights of this class only.
        self.weight = bnb.nn.Params4bit(packed, quant_state=self.quant_state, bnb_quantized=True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.quant_state.to(fn(self.quant_state.absmax).device)
        if self.weight is not None:
            self._hold(self.weight.data)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As bitsandbytes does."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight is not None:
            for name, value in self.quant_state.as_dict(packed=True).items():
                destination[f"{prefix}weight.{name}"] = value


class Int8(Storage):
    """int8 and each row's largest magnitude."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, maxima = parts
        return weight.to(dtype).mul_((maxima / 127)[:, None])


class Int8Linear(QuantizedLinear):
    """Weights in 8 bits with a scale for each row (arXiv 2208.07339); activations stay in their own dtype.

    Args:
        weight: (out, in), int8.
        maxima: (out,), each row's largest magnitude; `SCB` is bitsandbytes' name on disk.
        dtype: what adapters beside the layer are made in.
    """

    storage = "int8"
    SCB: Tensor

    def __init__(self, weight: Tensor, maxima: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.SCB = nn.Parameter(maxima, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
        self.compute_dtype = dtype

    @classmethod
    def quantize(cls, linear: nn.Linear) -> "Int8Linear":
        """By bitsandbytes' kernel for the weight's device."""

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            weight, maxima, _ = bnb.functional.int8_vectorwise_quant(rows.to(torch.float16))
            return weight, maxima

        weight, maxima = in_pieces(quantize, linear.weight.data)
        return cls(weight, maxima, linear.bias, linear.weight.dtype)

    def parts(self) -> list[Tensor]:
        return [self.weight, self.SCB]


class Quanto(Storage):
    """float8 or int8 and a scale (out, 1), multiplied in the scale's dtype as optimum-quanto does."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, scale = parts
        return (scale * weight.to(scale.dtype)).to(dtype)


class QuantoLinear(QuantizedLinear):
    """Weights of optimum-quanto in a layer of ours: its own has them under names that diffusers' LoRA loader misses.

    Args:
        weight: (out, in), float8 or int8.
        scale: (out, 1).
    """

    storage = "quanto"
    weight_scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.compute_dtype = scale.dtype

    @classmethod
    def quantize(cls, linear: nn.Linear, format: str) -> "QuantoLinear":
        """By quanto's own rule for a format: `fp8` or `int8`."""
        from optimum.quanto import absmax_scale, qfloat8, qint8

        kind = qfloat8 if format == "fp8" else qint8

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            scale = absmax_scale(rows, kind, axis=0)
            return torch.ops.quanto.quantize_symmetric(rows, dtype=kind.dtype, axis=0, scale=scale), scale

        weight, scale = in_pieces(quantize, linear.weight.data)
        return cls(weight, scale, linear.bias)

    def parts(self) -> list[Tensor]:
        return [self.weight, self.weight_scale]


STORAGES: dict[str, Callable[..., Storage]] = {
    "fp8": Float8,
    "fp4": partial(FourBit, "fp4"),
    "nf4": partial(FourBit, "nf4"),
    "int8": Int8,
    "quanto": Quanto,
}


@cache
def _storage(name: str) -> Storage:
    kind, *arguments = name.split()
    return STORAGES[kind](*arguments)
