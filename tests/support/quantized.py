"""Quantized layers, transformers, and commands on a tiny quantized base."""

import torch

from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.quantization.quantization import QUANTIZATIONS, Quantization
from tests.support.commands import short
from tests.support.tiny_pipelines import FLUX

NAMES = list(QUANTIZATIONS)
MODEL = ["model=flux_kontext_fp8", *FLUX["settings"]]
CPU = torch.device("cpu")


def quantization(format, skip=(), rotation=False):
    return Quantization(format, skip, ["transformer"], rotation)


def load(folder, class_name="FluxTransformer2DModel", dtype=torch.bfloat16, quantization=None):
    return TransformerSource(class_name, str(folder), None, dtype, quantization, 0).load(CPU)


def quantized(tiny, pairs, output, steps, format, *more):
    return [*MODEL, f"model.quantization.format={format}", *short(tiny, pairs, output, steps), *more]
