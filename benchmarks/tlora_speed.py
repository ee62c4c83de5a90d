"""Compare steps of T-LoRA and orthogonal T-LoRA with steps of a LoRA of the same rank, alternating in one process.

    python benchmarks/tlora_speed.py                          # the embedded model in float32
    python benchmarks/tlora_speed.py --model flux_dev --depth 2 --size 256

A step is training_step, backward and the optimizer, on latents in memory. Each round takes one step of each; figures
are medians over the rounds, ratios are within a round.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from hydra.utils import instantiate

from benchmarks.memory import compose, random_batch, write_shallow
from lightning_modules.execution.checkpointing import set_checkpointing

ADAPTERS = ("lora", "tlora", "ortho_tlora")


def build(adapter: str, options: argparse.Namespace, folder: str) -> tuple[Any, torch.optim.Optimizer]:
    """Build a module with random weights at the model's real widths, and its optimizer."""
    cfg = compose(options.model, folder, "float32", f"adapter={adapter}", f"adapter.rank={options.rank}")
    module = instantiate(cfg.model, _convert_="all")
    if options.model == "embedded":
        module.configure_model()
    else:
        torch.manual_seed(0)
        module.transformer = type(module.base.source.meta).from_config(module.base.source.meta.config)
        module.execution.adapt(module.transformer)
    policy = "full" if options.checkpointing else "none"
    set_checkpointing(module.transformer, policy, module.adapter.bind_rank_mask)
    return module, module.configure_optimizers()["optimizer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--depth", type=int, default=1, help="blocks of each kind, of a model that is not embedded")
    parser.add_argument("--size", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    print(f"{options.model}, float32, batch {options.batch}, rank {options.rank}, {options.rounds} rounds")
    print(f"{'pixels':>6} {'':12} {'ms':>9} {'of LoRA':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = "embedded" if options.model == "embedded" else temporary
        if folder == temporary:
            write_shallow(options.model, options.depth, folder)
        built = {adapter: build(adapter, options, folder) for adapter in ADAPTERS}
        for side in options.size:
            batch = random_batch(built["lora"][0], side, options.batch, torch.device("cpu"))
            seconds: dict[str, list[float]] = {adapter: [] for adapter in ADAPTERS}
            for number in range(-5, options.rounds):
                batch.draws = list(range((number + 5) * options.batch, (number + 6) * options.batch))
                for adapter in ADAPTERS:
                    module, optimizer = built[adapter]
                    start = time.perf_counter()
                    module.training_step(batch, number)["loss"].backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if number >= 0:
                        seconds[adapter].append(time.perf_counter() - start)
            for adapter in ADAPTERS:
                ratio = statistics.median(a / b for a, b in zip(seconds[adapter], seconds["lora"], strict=True))
                print(f"{side:6} {adapter:12} {1000 * statistics.median(seconds[adapter]):9.2f} {ratio:8.3f}")


if __name__ == "__main__":
    main()
