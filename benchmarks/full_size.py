"""Time a training step of a real transformer with random weights, in each precision, and print a table.

    python benchmarks/full_size.py --output benchmarks/results/h100.json
    python benchmarks/full_size.py --device cpu --depth 4 --in-turns --precisions float32 bf16 int8_w8a8 --size 288

Weights are made on the device and quantized there, one layer at a time. TFLOP/s count useful work only: the forward
pass and the gradients of inputs and of the LoRA, not what gradient checkpointing computes again. "Kernels run" is the
share of a step's time in which kernels run: below 100 % the GPU waits for Python.
"""

import argparse
import gc
import itertools
import json
import re
import shlex
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra.utils import instantiate
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

from benchmarks.memory import compose, loss, random_batch, write_shallow
from cli.terminal import silence_libraries
from datamodules.batch import LatentBatch
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.peft_layers import lora_layers
from lightning_modules.blocks import blocks
from lightning_modules.estimation.flops import matrix_peak, mean_seconds, step_flops
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.pretrained.weights import Weights

Row = dict[str, Any]
PRECISIONS = {
    "float32": [],
    "bf16": [],
    "fp8": ["model/quantization=fp8"],
    "nf4": ["model/quantization=fp4", "model.quantization.format=nf4"],
    "fp4": ["model/quantization=fp4"],
    "int8_w8a8": ["model/quantization=int8_w8a8"],
    "int8_w8a8, not rotated": ["model/quantization=int8_w8a8", "model.quantization.rotation=false"],
}


class RandomWeights(Weights):
    """Stands for files: each tensor is made on the device when it is read, the same one each time."""

    format = None

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.dtypes = dict.fromkeys(self.shapes, "BF16")
        self.notes: dict[str, Any] = {}
        self.device = device

    def read(self, name: str) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return 0.02 * torch.randn(self.shapes[name], generator=generator, device=self.device, dtype=torch.bfloat16)


def build(
    model: str,
    folder: str,
    precision: str,
    device: torch.device,
    *more: str,
    made_on: torch.device | None = None,
    peer: bool = False,
) -> Any:
    """Build a module that is ready to train on the device, as Lightning does.

    Args:
        more: settings of train.py.
        made_on: where its numbers are drawn; None for the device. Other devices draw others.
        peer: whether its transformer is diffusers' own with peft's LoRA.
    """
    dtype = "float32" if precision == "float32" else "bfloat16"
    settings = [*PRECISIONS[precision], "model.compile=false", *more]
    module = instantiate(compose(model, folder, dtype, *settings).model, _convert_="all")
    weights = RandomWeights(module.base.source.meta, made_on or device)
    module.to(device)
    with mock.patch.object(TransformerSource, "weights", return_value=weights), device:
        if peer:
            module.transformer = with_peft(module)
        else:
            module.configure_model()
    module.to(device)
    return module


def with_peft(module: Any) -> Any:
    """Load diffusers' transformer with peft's LoRA in the layers that the module's adapter adapts."""
    from peft import LoraConfig

    layers = lora_layers(module.execution.adapted_meta_transformer())
    transformer = module.base.load_transformer()
    names, ranks = "|".join(map(re.escape, layers)), module.adapter.ranks
    transformer.add_adapter(LoraConfig(r=module.adapter.rank, lora_alpha=ranks.alpha, target_modules=names))
    return transformer.train()


def execute(module: Any, policy: str, compiled: bool) -> None:
    """Set what steps keep for their backward pass, and compile the blocks for one size, or not."""
    execution = module.execution
    for block in blocks(module.transformer).values():
        block.forward = getattr(block.forward, "own", block.forward)  # the function that was compiled
    execution.compiles, execution._dynamic = compiled, False
    execution.set_checkpointing(module.transformer, policy)


def useful_flops(module: Any, batch: LatentBatch) -> int:
    """Count the FLOPs of a step, without what gradient checkpointing computes again."""
    transformer = module.execution.adapted_meta_transformer().float()
    return step_flops(module.execution, transformer, batch.to(torch.device("meta")))


def training_step(module: Any, batch: LatentBatch) -> Callable[[], None]:
    """Return a function that takes a step."""
    optimizer = torch.optim.AdamW(trainable(module.transformer).values(), lr=1e-6, fused=True)

    def step() -> None:
        loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(step: Callable[[], None], device: torch.device, rounds: int) -> Row:
    """Measure the seconds and the peak memory of a step, and on a GPU its kernels.

    Args:
        rounds: steps to average.
    """
    if device.type != "cuda":
        return {"seconds_per_step": round(mean_seconds(step, rounds), 4), "peak_memory_gb": None}
    torch.cuda.reset_peak_memory_stats(device)
    taken = mean_seconds(step, rounds)
    memory = torch.cuda.max_memory_allocated(device)
    kernel_seconds, launches = kernels(step, device)
    return {
        "seconds_per_step": round(taken, 4),
        "peak_memory_gb": round(memory / 1e9, 2),
        "kernel_seconds": round(kernel_seconds, 4),
        "kernel_share": round(kernel_seconds / taken, 3),
        "launches": launches,
    }


def kernels(step: Callable[[], None], device: torch.device) -> tuple[float, int]:
    """Return the sum of the seconds of a step's kernels and copies on a GPU, and their count.

    Seconds of a step in which nothing is traced are more than these where the GPU waits for Python.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    found = profiler.profiler.kineto_results.events()
    spans = [
        one.duration_ns() for one in found if one.device_type() == DeviceType.CUDA and not one.is_user_annotation()
    ]
    return sum(spans) / 1e9, len(spans)


def speed(row: Row, flops: float, peak: float) -> Row:
    """Return the useful FLOP/s of a measured row.

    Args:
        flops: FLOPs of its useful work.
        peak: FLOP/s of the device.
    """
    done = flops / row["seconds_per_step"]
    return {"tflops": round(done / 1e12, 2), "share_of_matrix_peak": round(done / peak, 3)}


def measured(module: Any, options: argparse.Namespace, device: torch.device, peak: float) -> Iterator[Row]:
    """Yield a row for each size, checkpointing policy, and eager or compiled blocks."""
    for side, policy, compiled in itertools.product(options.size, options.checkpointing, options.compiled):
        batch = random_batch(module, side, options.batch, device)
        row: Row = {"compiled": bool(compiled), "side": side, "checkpointing": policy}
        row["tokens"] = module.geometry.token_count(batch)
        execute(module, policy, bool(compiled))
        try:
            row |= measure(training_step(module, batch), device, options.steps)
            row |= speed(row, useful_flops(module, batch), peak)
        except torch.OutOfMemoryError:
            row |= {"out_of_memory": True}
        yield row


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown; rows that differ only in their round become one, with medians."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = [row[name] for name in ("precision", "compiled", "side", "checkpointing")]
        groups.setdefault(tuple(key), []).append(row)
    names = "weights", "compiled", "pixels", "tokens", "checkpointing", "s/step", "kernels run", "TFLOP/s", "peak, GB"
    lines = [f"| {' | '.join(names)} |", f"|{len(names) * '---|'}"]
    for (precision, compiled, side, policy), group in groups.items():
        cells = [precision, "yes" if compiled else "no", side, group[0].get("tokens", ""), policy]
        if all("seconds_per_step" in row for row in group):
            seconds, tflops = (statistics.median(row[name] for row in group) for name in ("seconds_per_step", "tflops"))
            share = f"{group[0]['kernel_share']:.0%}" if "kernel_share" in group[0] else ""
            cells += [f"{seconds:.3g}", share, f"{tflops:.3g}", group[0]["peak_memory_gb"] or ""]
        else:
            cells += ["out of memory", "", "", ""]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux_kontext")
    parser.add_argument("--depth", type=int, help="blocks of each kind; all by default")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8", "int8_w8a8", "nf4"])
    parser.add_argument("--compiled", nargs="+", type=int, choices=(0, 1), default=[0])
    parser.add_argument("--size", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="steps to average, after two that warm up")
    parser.add_argument("--in-turns", action="store_true", help="keep all models and measure three rounds of them")
    parser.add_argument("--checkpointing", nargs="+", default=["full", "none"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("settings", nargs="*", help="of train.py: adapter=tlora, ...")
    options = parser.parse_args()
    silence_libraries()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = matrix_peak(device, side=8192 if device.type == "cuda" else 2048)
    what = f"{options.model}{f', {options.depth} blocks of each kind' if options.depth else ''}, batch {options.batch}"
    head = f"{what}; {name}, torch {torch.__version__}, {peak / 1e12:.2f} TFLOP/s in bf16 products"
    print(head, flush=True)
    rows: list[Row] = []
    modules: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_shallow(options.model, options.depth, folder)
        for _ in range(3 if options.in_turns else 1):
            for precision in options.precisions:
                if precision not in modules:
                    modules[precision] = build(options.model, folder, precision, device, *options.settings)
                for row in measured(modules[precision], options, device, peak):
                    rows.append({"precision": precision} | row)
                    print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
                if not options.in_turns:
                    del modules[precision]
                    gc.collect()
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
    command = shlex.join(["python", "benchmarks/full_size.py", *sys.argv[1:]])
    print(f"\n{head}\n\n    {command}\n\n{table(rows)}")
    if options.output is not None:
        facts = {"command": command, "device": name, "torch": torch.__version__, "matrix_peak_tflops": peak / 1e12}
        options.output.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
