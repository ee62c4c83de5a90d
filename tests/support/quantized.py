"""Quantized layers, transformers, and commands on a tiny quantized base."""

import torch

from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.quantization.quantization import FORMATS, Quantization
from tests.support.commands import short
from tests.support.tiny_pipelines import FLUX

WAYS = [(format, backend) for format, row in FORMATS.items() for backend in row.backends]
MODEL = ["model=flux_kontext_fp8", *FLUX["settings"]]
CPU = torch.device("cpu")


def quantization(format, backend=None, skip=(), double_quant=False):
    """Return the settings that quantize a transformer."""
    return Quantization(format, backend, skip, ["transformer"], double_quant)


def load(folder, class_name="FluxTransformer2DModel", dtype=torch.bfloat16, quantization=None):
    """Load a transformer to the CPU."""
    return TransformerSource(class_name, str(folder), None, dtype, quantization, 0).load(CPU)


def quantized(tiny, pairs, output, steps, format, backend, *more):
    """Return the overrides of a short run."""
    how = [f"model.quantization.format={format}", f"model.quantization.backend={backend}"]
    return [*MODEL, *how, *short(tiny, pairs, output, steps), *more]
