"""int8: weights in 8 bits with a scale for each row, by bitsandbytes' kernels."""

from collections.abc import Mapping, Sequence
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from lightning_modules.quantization.fused import scaled_rows
from lightning_modules.quantization.linear import STORAGES, QuantizedLinear, Storage, in_pieces
from lightning_modules.quantization.stored import StoredLayer, refuse_incomplete


class Int8(Storage):
    """int8 and each row's largest magnitude."""

    def weight(self, parts: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weight, maxima = parts
        return scaled_rows(weight, (maxima / 127)[:, None], dtype)


class Int8Linear(QuantizedLinear):
    """Weights in 8 bits with a scale for each row (arXiv 2208.07339); activations stay in their own dtype.

    Args:
        weight: (out, in), int8.
        maxima: (out,), each row's largest magnitude; `SCB` is bitsandbytes' name on disk.
        dtype: what adapters beside the layer are made in.
    """

    storage = "int8"

    def __init__(self, weight: Tensor, maxima: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.shape, dtype, weight=weight, SCB=maxima, bias=bias)

    @classmethod
    def quantize(cls, linear: nn.Linear) -> "Int8Linear":
        """By bitsandbytes' kernel for the weight's device."""

        def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
            weight, maxima, _ = bnb.functional.int8_vectorwise_quant(rows.to(torch.float16))
            return weight, maxima

        weight, maxima = in_pieces(quantize, linear.weight.data)
        return cls(weight, maxima, linear.bias, linear.weight.dtype)


STORAGES["int8"] = Int8


def detect(name: str, dtype: str) -> bool:
    """Whether a tensor in a file shows that linear layers are in int8."""
    return name.endswith(".SCB")


def check(dtypes: Mapping[str, str], layers: Sequence[str], where: str) -> None:
    """Raise a UserError for layers in int8 without their rows' maxima."""
    missing = [name for name in layers if dtypes[f"{name}.weight"] == "I8" and f"{name}.SCB" not in dtypes]
    refuse_incomplete(where, "quant state", missing)


def read(stored: StoredLayer) -> Int8Linear | None:
    """A layer in bitsandbytes' layout."""
    if stored.kind != "I8":
        return None
    return Int8Linear(stored.read("weight"), stored.read("SCB").float(), stored.bias(), stored.dtype)


def config(format: str, double_quant: bool, plain: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """config.json's quantization_config, as diffusers reads it."""
    from diffusers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=plain).to_dict()
