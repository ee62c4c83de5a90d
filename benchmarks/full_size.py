"""Real transformers with random weights, in each precision, and the time and memory of their training steps.

Weights are made on the device and quantized there, one layer at a time. TFLOP/s count useful work only: the forward
pass and the gradients of inputs and of the LoRA, not what gradient checkpointing computes again.
"""

import zlib
from typing import Any
from unittest import mock

import torch
from hydra.utils import instantiate
from torch import Tensor

from benchmarks.memory import compose, loss
from datamodules.batch import LatentBatch
from lightning_modules.adapters.adapter import trainable
from lightning_modules.estimation.flops import mean_seconds, step_flops
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.pretrained import transformer
from lightning_modules.pretrained.weights import Weights

Row = dict[str, Any]
PRECISIONS = {
    "bf16": [],
    "fp8": ["model/quantization=fp8"],
    "nf4": ["model/quantization=fp4", "model.quantization.format=nf4"],
    "fp4": ["model/quantization=fp4"],
    "int8": ["model/quantization=fp8", "model.quantization.format=int8"],
}


class RandomWeights(Weights):
    """Stands for files: each tensor is made on the device when it is read, the same one each time."""

    format = "random"  # not None, by which a transformer in 16 bits would be left to diffusers

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.dtypes = dict.fromkeys(self.shapes, "BF16")
        self.notes: dict[str, Any] = {}
        self.device = device

    def read(self, name: str) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return 0.02 * torch.randn(self.shapes[name], generator=generator, device=self.device, dtype=torch.bfloat16)


def build(
    model: str, folder: str, precision: str, device: torch.device, *more: str, made_on: torch.device | None = None
) -> Any:
    """Build a module that is ready to train on the device, as Lightning does.

    Args:
        more: settings of train.py.
        made_on: where its numbers are drawn; None for the device. Other devices draw others.
    """
    module = instantiate(compose(model, folder, "bfloat16", *PRECISIONS[precision], *more).model, _convert_="all")
    weights = RandomWeights(module.base.source.meta, made_on or device)
    module.to(device)
    with mock.patch.object(transformer, "transformer_weights", return_value=weights), device:
        module.configure_model()
    module.to(device)
    return module


def measure(module: Any, batch: LatentBatch, policy: str, rounds: int, peak: float) -> Row:
    """Measure one row of results.

    Args:
        rounds: steps to average.
        peak: FLOP/s of the device.
    """
    device, samples = module.device, len(batch.keys)
    flops = step_flops(module.execution, batch.to(torch.device("meta")))
    compiled = module.execution.compile_blocks
    set_checkpointing(module.transformer, policy, module.adapter.bind_rank_mask, compiled)
    optimizer = torch.optim.AdamW(trainable(module.transformer).values(), lr=1e-6, fused=True)

    def step() -> None:
        loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = mean_seconds(step, rounds)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "tokens": module.geometry.token_count(batch),
        "checkpointing": policy,
        "seconds_per_step": round(taken, 4),
        "samples_per_second": round(samples / taken, 4),
        "tflops": round(flops / taken / 1e12, 2),
        "share_of_matrix_peak": round(flops / taken / peak, 3),
        "peak_memory_gb": None if memory is None else round(memory / 1e9, 2),
    }
