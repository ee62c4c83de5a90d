"""Linear layers with frozen quantized weights: fp8 here, 4 and 8 bits by bitsandbytes' kernels.

Their products keep nothing for the backward pass but the quantized weight, and that as a saved tensor, so that gradient
checkpointing and offloading can let go of it. bitsandbytes' own layers keep their inputs as well.
"""

import logging
from functools import cache
from typing import Any

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger("retouch")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Tensor cores take matrices whose sides are multiples of it.
TILE = 16


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in: autocast's dtype, or its input's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FrozenProduct(torch.autograd.Function):
    """x (..., in) -> x W^T (..., out), differentiable in x; W is made from its parts anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "QuantizedLinear", *parts: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*parts)
        return layer.product(x, *parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = ctx.saved_tensors
        return ctx.layer.input_gradient(grad, *parts), None, *[None] * len(parts)


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is put together from parts."""

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that the weight is made of."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        """The weight (out, in)."""
        raise NotImplementedError

    def product(self, x: Tensor, *parts: Tensor) -> Tensor:
        """x W^T."""
        return F.linear(x, self.dequantize(x.dtype, *parts))

    def input_gradient(self, grad: Tensor, *parts: Tensor) -> Tensor:
        """grad W."""
        return grad @ self.dequantize(grad.dtype, *parts)

    def forward(self, x: Tensor) -> Tensor:
        y = FrozenProduct.apply(x.to(compute_dtype(x)), self, *self.parts())
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Fp8Linear(QuantizedLinear):
    """Weights in float8 with scales, multiplied on fp8 tensor cores where there are any (arXiv 2209.05433).

    Args:
        weight: (out, in), float8.
        scale: (out, 1), or (1, 1) for all; the weight is weight * scale.
        dtype: what adapters beside the layer are made in.
        gradient_dtype: float8_e5m2 quantizes gradients for tensor cores; any other multiplies them in their own dtype.
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

    @classmethod
    def quantize(cls, linear: nn.Linear, gradient_dtype: torch.dtype) -> "Fp8Linear":
        """Per-row scales that are powers of two: they cost no precision, and multiplying by them is exact."""
        mantissa, exponent = torch.frexp(row_scale(linear.weight, E4M3))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
        weight = to_float8(linear.weight, scale, E4M3)
        return cls(weight, scale, linear.bias, linear.weight.dtype, gradient_dtype)

    def parts(self) -> tuple[Tensor, ...]:
        return self.weight, self.weight_scale

    def dequantize(self, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        weight, scale = parts
        return weight.to(dtype).mul_(scale)

    def product(self, x: Tensor, *parts: Tensor) -> Tensor:
        weight, scale = parts
        if not self._on_tensor_cores(x, weight):
            return super().product(x, *parts)
        rows, row_scales = quantize_rows(x.reshape(-1, self.in_features), E4M3)
        # Both scaled by rows: the second matrix is weight^T, column by column.
        y = torch._scaled_mm(
            rows,
            weight.t(),
            scale_a=row_scales,
            scale_b=scale.expand(self.out_features, 1).reshape(1, -1).contiguous(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def input_gradient(self, grad: Tensor, *parts: Tensor) -> Tensor:
        weight, scale = parts
        if self.gradient_dtype != E5M2 or not self._on_tensor_cores(grad, weight):
            return super().input_gradient(grad, *parts)
        # The weight's scales are along the sum: they go into the gradient.
        rows, row_scales = quantize_rows(grad.reshape(-1, self.out_features) * scale.to(grad.dtype).t(), E5M2)
        ones = torch.ones(1, self.in_features, device=grad.device)
        # Hopper's tensor cores want the second matrix column by column: a copy of one layer's bytes.
        columns = weight.t().contiguous().t()
        x = torch._scaled_mm(rows, columns, scale_a=row_scales, scale_b=ones, out_dtype=torch.bfloat16)
        return x.view(*grad.shape[:-1], self.in_features).to(grad.dtype)

    def _on_tensor_cores(self, x: Tensor, weight: Tensor) -> bool:
        whole = self.in_features % TILE == 0 and self.out_features % TILE == 0
        return whole and weight.dtype == E4M3 and has_fp8_tensor_cores(x.device)


@cache
def has_fp8_tensor_cores(device: torch.device) -> bool:
    """Compute capability 8.9 and later, where PyTorch's kernels run; AMD's fp8 is another."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    ones, scale = torch.ones(TILE, TILE, device=device), torch.ones(TILE, 1, device=device)
    try:
        for dtype in (E4M3, E5M2):
            second = ones.to(E4M3).t()
            torch._scaled_mm(ones.to(dtype), second, scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        log.warning(f"note: fp8 saves memory only, for its tensor cores cannot be used here: {first}")
        return False
    return True


def row_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., n) -> (..., 1), float32: a row's largest magnitude over the largest number of a float8 dtype."""
    return (x.abs().amax(-1, keepdim=True).float() / torch.finfo(dtype).max).clamp_min(torch.finfo(torch.float32).tiny)


def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale; a conversion alone would make NaN of what rounding lifts above the largest number."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(n, k) -> float8 (n, k) and scales (n, 1) in float32."""
    rows, scale = _fused_rows(x.device)(x, dtype)
    return rows.contiguous(), scale


def _quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = row_scale(x, dtype)
    return to_float8(x, scale, dtype), scale


@cache
def _fused_rows(device: torch.device) -> Any:
    """On a GPU one kernel that reads x once: as separate operations this would eat what tensor cores gain."""
    if device.type != "cuda":
        return _quantize_rows
    fused = torch.compile(_quantize_rows, dynamic=True)
    try:
        for dtype in (E4M3, E5M2):
            fused(torch.ones(TILE, TILE, device=device, dtype=torch.bfloat16), dtype)
    except (RuntimeError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        log.warning(f"note: fp8 is slower than it could be, for torch.compile does not run here: {first}")
        return _quantize_rows
    return fused


class FourBitLinear(QuantizedLinear):
    """fp4 or nf4 (arXiv 2305.14314), a scale for each block of 64 weights, by bitsandbytes.

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

    @classmethod
    def quantize(cls, linear: nn.Linear, quant_type: str, double_quant: bool) -> "FourBitLinear":
        """By the kernel for the weight's device."""
        packed, state = bnb.functional.quantize_4bit(
            linear.weight.data, quant_type=quant_type, compress_statistics=double_quant
        )
        return cls(packed, state, linear.bias, linear.weight.dtype)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def dequantize(self, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        return bnb.functional.dequantize_4bit(parts[0].data, self.quant_state).to(dtype)

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


class Int8Linear(QuantizedLinear):
    """Weights in 8 bits with a scale for each row (arXiv 2208.07339); activations stay in their own dtype.

    Args:
        weight: (out, in), int8.
        maxima: (out,), each row's largest magnitude; `SCB` is bitsandbytes' name on disk.
        dtype: what adapters beside the layer are made in.
    """

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
        weight, maxima, _ = bnb.functional.int8_vectorwise_quant(linear.weight.data.to(torch.float16))
        return cls(weight, maxima, linear.bias, linear.weight.dtype)

    def parts(self) -> tuple[Tensor, ...]:
        return self.weight, self.SCB

    def dequantize(self, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        weight, maxima = parts
        return weight.to(dtype).mul_((maxima / 127)[:, None])


class QuantoLinear(QuantizedLinear):
    """Weights of optimum-quanto in a layer of ours: its own has them under names that diffusers' LoRA loader misses.

    Args:
        weight: (out, in), quantized.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]

    @classmethod
    def quantize(cls, linear: nn.Linear, format: str) -> "QuantoLinear":
        """By quanto's own rule for a format: `fp8` or `int8`."""
        from optimum.quanto import QLinear, qfloat8, qint8

        weight = QLinear.from_module(linear, weights=qfloat8 if format == "fp8" else qint8).qweight
        return cls(weight.detach(), linear.bias)

    def parts(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def dequantize(self, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        [weight] = parts
        return weight.dequantize().to(dtype)
