"""A training step of the real transformer with random weights, in each precision, on a GPU where there is one.

    python benchmarks/full_size.py --output benchmarks/results/h200.json

Weights are made on the device and quantized there, one layer at a time. TFLOP/s count useful work only (roofline.py):
the forward pass and the gradients of inputs and of the LoRA, not what gradient checkpointing computes again.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from hydra.utils import instantiate
from torch import Tensor
from torch.profiler import profile

from benchmarks.memory import compose, empty_batch, write_shallow
from datamodules.batch import LatentBatch
from lightning_modules import flow
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.rank_mask import mask_forwards
from lightning_modules.estimation.flops import matrix_peak, median_seconds
from lightning_modules.execution.checkpointing import set_checkpointing
from lightning_modules.pretrained.assembly import assemble
from lightning_modules.pretrained.weights import Weights
from lightning_modules.quantization.quantization import nbytes
from tasks.terminal import silence_libraries

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


class RandomWeights(Weights):
    """Stands for files: each tensor is made on the device when it is read."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.dtypes = dict.fromkeys(self.shapes, "BF16")
        self.device = device

    def read(self, name: str) -> Tensor:
        return 0.02 * torch.randn(self.shapes[name], device=self.device, dtype=torch.bfloat16)


def build(options: argparse.Namespace, folder: str, precision: str, device: torch.device) -> Any:
    """A module whose transformer is on the device, with its adapter."""
    more = [f"adapter={options.adapter}", f"adapter.rank={options.rank}", *PRECISIONS[precision]]
    more += [f"model.compile={options.compile}", f"model.attention_backend={options.attention_backend}"]
    module = instantiate(compose(options.model, folder, "bfloat16", *more).model, _convert_="all")
    with init_empty_weights():
        transformer = type(module.base.source.meta).from_config(module.base.source.meta.config)
    weights, quantization = RandomWeights(transformer, device), module.base.source.quantization
    assemble(transformer, weights, dtype=torch.bfloat16, device=device, quantization=quantization)
    module.execution.adapt(transformer)
    module.transformer = transformer.to(device)
    mask_forwards(module.transformer, module.rank_gates, lambda: None)
    module.execution.prepare(module.transformer, dynamic=False)
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
            return flow.flow_loss(module.velocity(module.transformer, target, t, controls, prompt), target).mean()

    return loss


def measure(options: argparse.Namespace, module: Any, side: int, policy: str, peak: float) -> dict[str, Any]:
    """One row of results."""
    device = torch.device(options.device)
    batch = empty_batch(module, side, options.batch)
    flops = module.step_flops(batch)
    set_checkpointing(module.transformer, policy, module.adapter.bind_rank_mask, module.execution.compile_blocks)
    loss = filled(batch, module, device)
    optimizer = torch.optim.AdamW(trainable(module.transformer).values(), lr=1e-6, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = median_seconds(step, options.rounds, device)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if options.profile:
        with profile() as profiler:
            step()
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70))
    return {
        "side": side,
        "tokens": module.geometry.token_count(batch),
        "checkpointing": policy,
        "seconds_per_step": round(taken, 4),
        "samples_per_second": round(options.batch / taken, 4),
        "tflops": round(flops / taken / 1e12, 2),
        "share_of_matrix_peak": round(flops / taken / peak, 3),
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
    parser.add_argument("--adapter", choices=("lora", "tlora", "ortho_tlora"), default="lora")
    parser.add_argument("--checkpointing", nargs="+", default=["full", "none"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--attention_backend", default="null")
    parser.add_argument("--profile", action="store_true", help="print where each step's time goes, by kernel")
    parser.add_argument("--matrix", type=int, default=8192, help="side of the product that the peak is measured by")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    silence_libraries()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = matrix_peak(device, options.matrix)
    what = f"{options.model}, {options.adapter} of rank {options.rank}, batch {options.batch}"
    how = f"compile {options.compile}, attention by {options.attention_backend}"
    print(f"{what}, {how}, {name}: {peak / 1e12:.1f} TFLOP/s in bf16 products")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        if folder == temporary:
            write_shallow(options.model, None, folder)
        for precision in options.precisions:
            module = build(options, folder, precision, device)
            weights = round(nbytes(module.transformer) / 1e6, 2)
            for side in options.size:
                for policy in options.checkpointing:
                    row: dict[str, Any] = {"precision": precision, "weights_mb": weights}
                    try:
                        row |= measure(options, module, side, policy, peak)
                    except torch.OutOfMemoryError:
                        row |= {"side": side, "checkpointing": policy, "out_of_memory": True}
                    rows.append(row)
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            del module
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.output is not None:
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "diffusers": diffusers.__version__}
        command = shlex.join(["python", "benchmarks/full_size.py", *sys.argv[1:]])
        facts = {"batch": options.batch, "rank": options.rank, "adapter": options.adapter, "compile": options.compile}
        facts |= {"attention_backend": options.attention_backend, "matrix_peak_tflops": peak / 1e12}
        result = {"command": command, "device": name, "versions": versions, **facts, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
