"""fp4 and nf4 (arXiv 2305.14314): 4 bits a weight and a scale for each block of 64, by bitsandbytes' kernels."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import UserError
from lightning_modules.quantization.linear import STORAGES, QuantizationFormat, QuantizedLinear, Storage, in_pieces

# bitsandbytes compiles its kernels for devices without any of their own, and even their decorator imports Inductor.
compiles = os.environ.get("TORCHDYNAMO_DISABLE", "0")
os.environ["TORCHDYNAMO_DISABLE"] = "1"
import bitsandbytes as bnb  # noqa: E402

os.environ["TORCHDYNAMO_DISABLE"] = compiles

# A layer's tensor in safetensors files by which its format is detected.
QUANT_STATES = {quant_type: f"weight.quant_state.bitsandbytes__{quant_type}" for quant_type in ("fp4", "nf4")}
# Its other tensors.
COMPANIONS = "|".join((*QUANT_STATES.values(), r"weight\.(?:nested_)?(?:absmax|quant_map)"))


class FourBit(Storage):
    """Two weights in each uint8, and the scales of their blocks.

    Double quantization, which files of other programs may have, stores the scales in 8 bits: three more parts follow,
    their offset, their own scales, and the values of the 8-bit codes.

    Args:
        quant_type: `fp4` or `nf4`.
        blocksize, nested_blocksize: weights, and scales, that share a scale.
        dtype: the dtype of the dequantized weights.
    """

    def __init__(self, quant_type: str, blocksize: str, nested_blocksize: str, dtype: str) -> None:
        self.quant_type = quant_type
        self.blocksize, self.nested_blocksize = int(blocksize), int(nested_blocksize)
        self.dtype = getattr(torch, dtype)

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        packed, absmax, *nested = parts
        if nested:
            offset, absmax2, code = nested
            scales = torch.ops.bitsandbytes.dequantize_blockwise.default
            absmax = scales(absmax, absmax2, code, self.nested_blocksize, torch.float32).add_(offset)
        kernel = torch.ops.bitsandbytes.dequantize_4bit.default
        return kernel(packed, absmax.float(), self.blocksize, self.quant_type, shape, self.dtype).to(dtype)


STORAGES.update({quant_type: partial(FourBit, quant_type) for quant_type in QUANT_STATES})


class FourBitLinear(QuantizedLinear):
    """A linear layer in fp4 or nf4.

    Args:
        packed: uint8, two weights in each.
        quant_state: the scales and the shape.
        dtype: as in `QuantizedLinear`.
    """

    shardable = False  # FSDP splits parameters by rows, which packed blocks do not have

    def __init__(
        self, packed: Tensor, quant_state: bnb.functional.QuantState, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        nested = quant_state.state2.blocksize if quant_state.nested else 0
        dequantized = str(quant_state.dtype).removeprefix("torch.")
        storage = f"{quant_state.quant_type} {quant_state.blocksize} {nested} {dequantized}"
        super().__init__(storage, quant_state.shape, dtype, bias, weight=packed)
        self.quant_state = quant_state
        self._hold(packed)

    def parts(self) -> list[Tensor]:
        state = self.quant_state
        parts = [self.weight.data, state.absmax]
        return [*parts, state.offset, state.state2.absmax, state.state2.code] if state.nested else parts

    def _hold(self, packed: Tensor) -> None:
        # diffusers reads the true shape only from weights of this class.
        self.weight = bnb.nn.Params4bit(packed, quant_state=self.quant_state, bnb_quantized=True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.quant_state.to(fn(self.quant_state.absmax).device)
        if self.weight is not None:
            self._hold(self.weight.data)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the quant state under bitsandbytes' names."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight is not None:
            for name, value in self.quant_state.as_dict(packed=True).items():
                destination[f"{prefix}weight.{name}"] = value


def quantize_four_bit(quant_type: str, linear: nn.Linear) -> FourBitLinear:
    """Quantize with the kernel for the weight's device, to the bits of `bitsandbytes.functional.quantize_4bit`."""
    weight, dtype = linear.weight.data, linear.weight.dtype
    states: list[bnb.functional.QuantState] = []

    def quantize(piece: Tensor) -> tuple[Tensor, Tensor]:
        packed, state = bnb.functional.quantize_4bit(piece, quant_type=quant_type)
        states.append(state)
        return packed, state.absmax

    packed, absmax = in_pieces(quantize, weight.flatten())
    state = states[0]
    state.absmax, state.shape, state.dtype = absmax, weight.shape, dtype
    return FourBitLinear(packed, state, linear.bias, dtype)


def read_four_bit(parts: Mapping[str, Tensor], name: str, dtype: torch.dtype, group: int) -> FourBitLinear:
    """Build a layer in bitsandbytes' layout; a `Read`."""
    weight = parts["weight"]
    state = {key.removeprefix("weight."): part for key, part in parts.items() if key.startswith("weight.")}
    try:
        quant_state = bnb.functional.QuantState.from_dict(state, weight.device)
    except (KeyError, ValueError, AssertionError) as error:
        raise UserError(f"the quant state of {name} is damaged: {error}; download the file again") from error
    return FourBitLinear(weight, quant_state, parts.get("bias"), dtype)


FP4, NF4 = (
    QuantizationFormat(
        4.5, partial(quantize_four_bit, quant_type), read_four_bit, ["U8"], COMPANIONS, [*QUANT_STATES.values()], sign
    )
    for quant_type, sign in QUANT_STATES.items()
)
