"""Linear layers with frozen quantized weights: the functions that multiply by them, and their layouts in files.

The backward pass needs only the quantized weight, kept as saved tensors: gradient checkpointing and offloading can free
it. bitsandbytes' own layers also keep their inputs.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundation.errors import UserError, listing
from foundation.files import reason
from lightning_modules.blocks import compute_dtype

log = logging.getLogger("retouch")

# Weights that are quantized at once; a multiple of every format's block size.
PIECE = 2**21
# Device types on which element-wise work is compiled to one kernel, and from how many elements; functions for which
# that failed.
FUSES = {"cuda": 0, "cpu": 2**20}
_UNFUSED: set[Any] = set()
# Integer dtypes by their bytes.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
# Storages by name; each format's file adds its own.
STORAGES: dict[str, Callable[..., "Storage"]] = {}
# Names of a layer's scale: diffusers' and ComfyUI's.
SCALES = ("weight_scale", "scale_weight")
# Names of scales of inputs, which are not used: inputs are scaled by their own size.
HINTS = ("input_scale", "scale_input")
# All of these, and ComfyUI's note of the format.
SCALED = "|".join((*SCALES, *HINTS, "comfy_quant"))


class Storage:
    """Arithmetic of a frozen weight W (out, in) that is stored in parts."""

    name: str  # the key of `STORAGES`, then its arguments
    group = 1  # inputs that are rotated together; 1 for none

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return W (out, in)."""
        raise NotImplementedError

    def product(
        self, x: Tensor, parts: Sequence[Tensor], shape: tuple[int, int], bias: Tensor | None, rounds: bool
    ) -> Tensor:
        """Multiply (..., in) by W^T and add a bias (out,) -> (..., out).

        Args:
            rounds: whether x may be rounded to 8 bits.
        """
        if torch.compiler.is_compiling():
            return unrounded_product(x, list(parts), bias, self.name, *shape)
        return F.linear(x, self.weight(parts, shape, x.dtype), bias)

    def input_gradient(self, grad: Tensor, parts: Sequence[Tensor], shape: tuple[int, int], rounds: bool) -> Tensor:
        """Multiply (..., out) by W -> (..., in).

        Args:
            rounds: whether the gradient may be rounded to 8 bits.
        """
        if torch.compiler.is_compiling():
            return unrounded_gradient(grad, list(parts), self.name, *shape)
        return grad @ self.weight(parts, shape, grad.dtype)


# Operators: torch.compile would compute a layer's weight once for both passes and keep it between them.
@torch.library.custom_op("retouch::unrounded_product", mutates_args=())
def unrounded_product(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, storage: str, out_features: int, in_features: int
) -> Tensor:
    """Compute x W^T + bias in a compiled graph."""
    return F.linear(x, read_storage(storage).weight(parts, (out_features, in_features), x.dtype), bias)


@torch.library.custom_op("retouch::unrounded_gradient", mutates_args=())
def unrounded_gradient(grad: Tensor, parts: list[Tensor], storage: str, out_features: int, in_features: int) -> Tensor:
    """Compute grad W in a compiled graph."""
    return grad @ read_storage(storage).weight(parts, (out_features, in_features), grad.dtype)


unrounded_product.register_fake(lambda x, *others: x.new_empty(*x.shape[:-1], others[-2]))
unrounded_gradient.register_fake(lambda grad, *others: grad.new_empty(*grad.shape[:-1], others[-1]))


class FrozenProduct(torch.autograd.Function):
    """Product with a frozen weight, differentiable in x; the backward pass computes the weight again from its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        storage: Storage,
        shape: tuple[int, int],
        rounds: bool,
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.arguments = storage, shape, rounds
        return storage.product(x, parts, shape, bias, rounds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        storage, shape, rounds = ctx.arguments
        parts = ctx.saved_tensors
        return storage.input_gradient(grad, parts, shape, rounds), *[None] * (4 + len(parts))


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is computed from parts.

    Args:
        storage: a key of `STORAGES`, then the arguments of that storage.
        shape: shape of the weight, (out, in).
        dtype: dtype of the adapter's computation next to the layer.
        bias: None for a layer without.
        parts: the weight's parts by parameter name, in their order. Floating-point parts are held as integers of the
            same bits.

    Attributes:
        rounds: whether inputs and gradients are rounded to 8 bits where the storage can multiply them so.
    """

    rounds = True

    def __init__(
        self, storage: str, shape: Sequence[int], dtype: torch.dtype, bias: Tensor | None, **parts: Tensor
    ) -> None:
        nn.Module.__init__(self)
        self.storage = storage
        self._arithmetic = read_storage(storage)
        self.group = self._arithmetic.group
        self.out_features, self.in_features = shape
        self.compute_dtype = dtype  # the name that peft and diffusers look for
        self._dtypes = {name: part.dtype for name, part in parts.items()}
        # Parameters, not buffers: DDP would broadcast buffers before each forward.
        for name, part in parts.items():
            # diffusers and transformers cast inputs to the dtype of a layer's weight, or of a model's first float.
            held = part.view(INTEGERS[part.itemsize]) if part.is_floating_point() else part
            self.register_parameter(name, nn.Parameter(held, requires_grad=False))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def parts(self) -> list[Tensor]:
        """Return the tensors that the weight is computed from."""
        return [getattr(self, name).view(dtype) for name, dtype in self._dtypes.items()]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, dtype in self._dtypes.items():
            if (key := f"{prefix}{name}") in destination:  # not for a block whose weights are offloaded
                destination[key] = destination[key].view(dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in)."""
        return self._arithmetic.weight(self.parts(), (self.out_features, self.in_features), dtype)

    @torch.no_grad()
    def exact_product(self, x: Tensor) -> Tensor:
        """Multiply (..., in) by the dequantized weight -> (..., out) in x's dtype, without rounding x to 8 bits."""
        return self._arithmetic.product(x, self.parts(), (self.out_features, self.in_features), None, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        shape, parts = (self.out_features, self.in_features), self.parts()
        if x.requires_grad and torch.is_grad_enabled():
            return FrozenProduct.apply(x, bias, self._arithmetic, shape, self.rounds, *parts)
        return self._arithmetic.product(x, parts, shape, bias, self.rounds)


@cache
def read_storage(name: str) -> Storage:
    """Return the storage of a key of `STORAGES` and its arguments."""
    kind, *arguments = name.split()
    storage = STORAGES[kind](*arguments)
    storage.name = name
    return storage


# Builds a layer from its tensors (on its device, named without the layer's name, the bias in its final dtype), its
# name, the dtype of unquantized weights, and the number of inputs that are rotated together.
Read = Callable[[Mapping[str, Tensor], str, torch.dtype, int], QuantizedLinear]


@dataclass(frozen=True)
class QuantizationFormat:
    """A way to store the weights of linear layers: how they are quantized, and their layout in safetensors files."""

    bits: float  # of a weight, with its share of a block's scales but not of a row's
    quantize: Callable[[nn.Linear], QuantizedLinear]  # returns the quantized layer, on the same device
    read: Read  # builds a layer
    dtypes: Collection[str]  # safetensors' dtype names of its weights
    companions: str  # pattern of the names of a layer's other tensors
    needs: Sequence[str]  # companions of which a layer must have one
    sign: str | None = None  # part of a tensor name that identifies the format; None where the weights' dtype does
    marker: str | None = None  # name of a tensor without which a file may contain weights only

    @property
    def is_four_bit(self) -> bool:
        return self.bits < 5

    def detect(self, name: str, dtype: str) -> bool:
        """Return whether a tensor of this name and dtype identifies the format."""
        return self.sign in name if self.sign else name.endswith(".weight") and dtype in self.dtypes

    def readable(self, dtypes: Mapping[str, str], layers: Collection[str], where: str) -> set[str]:
        """Return the names of the tensors that it reads.

        Args:
            dtypes: the dtype of each tensor by name.
            layers: the model's linear layers.

        Raises:
            UserError: a quantized layer lacks its companions.
        """
        quantized = {name for name in layers if dtypes[f"{name}.weight"] in self.dtypes}
        matches = [re.fullmatch(rf"(.+)\.({self.companions})", name) for name in dtypes]
        found = [match for match in matches if match and match[1] in quantized]
        read = {match[0] for match in found} | ({self.marker} if self.marker and self.marker in dtypes else set())
        if self.marker and not read:
            return {name for name, dtype in dtypes.items() if dtype in self.dtypes}
        if lacking := sorted(quantized - {match[1] for match in found if match[2] in self.needs}):
            raise UserError(
                f"{where} lacks the scales of {listing(lacking)}: the file is incomplete; download it again"
            )
        return read | {f"{name}.weight" for name in quantized}


def stored_scale(parts: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return a layer's scale (out, 1) or (1, 1) in float32, None without one; raise a UserError for another shape.

    Args:
        parts: its tensors by their names without the layer's.
        name: the layer's name.
    """
    scale, rows = next((parts[key] for key in SCALES if key in parts), None), len(parts["weight"])
    if scale is None:
        return None
    if scale.itemsize == 1 or scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        raise UserError(
            f"{name} has scales {tuple(scale.shape)} in {scale.dtype} on disk: expected one for the layer, or one for "
            "each row, in 16 or 32 bits"
        )
    return scale.float().reshape(-1, 1).clone()  # layers that share one in a file would be saved as one


def in_pieces(quantize: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> tuple[Tensor, ...]:
    """Quantize a few rows (or blocks of a flat weight) at a time: kernels allocate several float32 copies."""
    pieces = [quantize(piece) for piece in weight.split(max(1, PIECE // max(1, weight[0].numel())))]
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def fused(run: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Call an element-wise function, if large as one kernel: as separate operations it would cost what 8 bits gain."""
    kind = run, x.device, x.dtype
    small = x.numel() < FUSES.get(x.device.type, x.numel() + 1)
    if torch.compiler.is_compiling() or small or kind in _UNFUSED:
        return run(x, *args)
    try:
        # torch.compile would build one more graph for each grad and autocast mode; images are sampled by eager blocks.
        modes = torch.no_grad(), torch.autocast(x.device.type, enabled=False), torch.compiler.set_stance("default")
        with modes[0], modes[1], modes[2]:
            return _compiled(run)(x.detach(), *args)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError) as error:
        if not _UNFUSED:
            log.warning(f"note: quantized layers are slower than possible: torch.compile fails here: {reason(error)}")
        _UNFUSED.add(kind)
        return run(x, *args)


@cache
def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    return torch.compile(run, dynamic=True)
