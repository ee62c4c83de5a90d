"""A training step of the real transformer with random weights, in each precision, on a GPU where there is one.

    python benchmarks/full_size.py --output benchmarks/results/h200.json

Weights are made on the device and quantized there, one layer at a time. TFLOP/s count useful work only: the forward
pass and the gradients of inputs and of the LoRA, not what gradient checkpointing computes again.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from hydra.utils import instantiate
from memory import compose, empty_batch, write_shallow
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from callbacks.console import silence_libraries
from datamodules.batch import LatentBatch
from lightning_modules import flow
from lightning_modules.adapter import trainable
from lightning_modules.quantization import nbytes
from lightning_modules.weights import assemble

PRECISIONS = {
    "bf16": [],
    "fp8": ["model/quantization=fp8"],
    "fp8 with modulation": [
        "model/quantization=fp8",
        "model.quantization.modules_to_not_convert=[x_embedder,proj_out]",
    ],
    "fp8 by torchao": ["model/quantization=fp8", "model.quantization.backend=torchao"],
    "nf4": ["model/quantization=fp4", "model.quantization.format=nf4"],
    "fp4": ["model/quantization=fp4"],
    "int8": ["model/quantization=fp8", "model.quantization.format=int8"],
}


class RandomWeights:
    """Stands for files: each tensor is made on the device when it is read."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.dtypes = dict.fromkeys(self.shapes, "BF16")
        self.device = device

    def read(self, name: str) -> Tensor:
        return 0.02 * torch.randn(self.shapes[name], device=self.device, dtype=torch.bfloat16)


def build(options: argparse.Namespace, folder: str, precision: str, device: torch.device) -> Any:
    """A module whose transformer is on the device, with its adapter."""
    more = [f"adapter.rank={options.rank}", *PRECISIONS[precision]]
    module = instantiate(compose(options.model, folder, "bfloat16", *more).model, _convert_="all")
    with init_empty_weights():
        transformer = type(module.meta_transformer()).from_config(module.meta_transformer().config)
    weights, quantization = RandomWeights(transformer, device), module.source.quantization
    assemble(transformer, weights, dtype=torch.bfloat16, device=device, quantization=quantization)
    module.adapt(transformer)
    module.transformer = transformer.to(device)
    return module


def filled(batch: LatentBatch, module: Any, device: torch.device) -> Callable[[], Tensor]:
    """The loss of the batch with random numbers in it."""
    assert batch.target_mean is not None
    target, *controls = (torch.randn(image.shape, device=device) for image in (batch.target_mean, *batch.controls))
    prompt = {
        name: torch.randn(tensor.shape, device=device, dtype=torch.bfloat16) for name, tensor in batch.prompt.items()
    }
    t = torch.full((len(target),), 0.5, device=device)

    def loss() -> Tensor:
        kind = "cuda" if device.type == "cuda" else "cpu"
        with torch.autocast(kind, torch.bfloat16):
            return flow.flow_loss(module.velocity(target, t, controls, prompt), target).mean()

    return loss


def useful_flops(options: argparse.Namespace, folder: str, side: int) -> int:
    """Of forward and backward without checkpointing, counted on tensors without content."""
    meta = torch.device("meta")
    module = instantiate(
        compose(options.model, folder, "bfloat16", f"adapter.rank={options.rank}").model, _convert_="all"
    )
    module.transformer = module.meta_transformer().to(torch.bfloat16)
    module.adapt(module.transformer)
    with FlopCounterMode(display=False) as counter:
        filled(empty_batch(module, side, options.batch), module, meta)().backward()
    return counter.get_total_flops()


def seconds(run: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """The median of one call, after two that warm up."""
    taken = []
    for number in range(-2, rounds):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        if number >= 0:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_peak(device: torch.device, side: int) -> float:
    """TFLOP/s of a square bf16 product."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b, 20, device) / 1e12


def measure(
    options: argparse.Namespace, module: Any, side: int, checkpointing: bool, flops: int, peak: float
) -> dict[str, Any]:
    """One row of results."""
    device = torch.device(options.device)
    module.set_gradient_checkpointing(module.transformer, checkpointing)
    loss = filled(empty_batch(module, side, options.batch), module, device)
    optimizer = torch.optim.AdamW(trainable(module.transformer).values(), lr=1e-6)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = seconds(step, options.rounds, device)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "side": side,
        "checkpointing": checkpointing,
        "seconds_per_step": round(taken, 4),
        "samples_per_second": round(options.batch / taken, 4),
        "tflops": round(flops / taken / 1e12, 2),
        "share_of_matrix_peak": round(flops / taken / 1e12 / peak, 3),
        "peak_memory_gb": None if memory is None else round(memory / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux_kontext")
    parser.add_argument("--folder", help="a local model's configuration, in place of the real one")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8", "nf4"])
    parser.add_argument("--size", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--matrix", type=int, default=8192, help="side of the product that the peak is measured by")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    silence_libraries()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = matrix_peak(device, options.matrix)
    print(f"{options.model}, batch {options.batch}, rank {options.rank}, {name}: {peak:.1f} TFLOP/s in bf16 products")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        if folder == temporary:
            write_shallow(options.model, None, folder)
        flops = {side: useful_flops(options, folder, side) for side in options.size}
        for precision in options.precisions:
            module = build(options, folder, precision, device)
            weights = round(nbytes(module.transformer) / 1e6, 2)
            for side in options.size:
                for checkpointing in (True, False):
                    row: dict[str, Any] = {"precision": precision, "weights_mb": weights}
                    try:
                        row |= measure(options, module, side, checkpointing, flops[side], peak)
                    except torch.OutOfMemoryError:
                        row |= {"side": side, "checkpointing": checkpointing, "out_of_memory": True}
                    rows.append(row)
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            del module
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.output is not None:
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "diffusers": diffusers.__version__}
        command = shlex.join(["python", "benchmarks/full_size.py", *sys.argv[1:]])
        result = {"command": command, "device": name, "versions": versions, "matrix_peak_tflops": peak, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
