"""Compare steps of T-LoRA and orthogonal T-LoRA with steps of a LoRA of the same rank, alternating in one process.

    python benchmarks/tlora_speed.py

The embedded model in float32, on a CPU; benchmarks/gpu_check.py compares larger models. A step is training_step,
backward and the optimizer, on latents in memory. Each round takes one step of each; figures are medians over the
rounds, ratios are within a round.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from hydra.utils import instantiate

from benchmarks.memory import compose, random_batch
from lightning_modules.execution.checkpointing import set_checkpointing

ADAPTERS = ("lora", "tlora", "ortho_tlora")


def build(adapter: str, rank: int) -> tuple[Any, torch.optim.Optimizer]:
    """Build a module and its optimizer."""
    cfg = compose("embedded", "embedded", "float32", f"adapter={adapter}", f"adapter.rank={rank}")
    module = instantiate(cfg.model, _convert_="all")
    module.configure_model()
    set_checkpointing(module.transformer, "none", module.adapter.bind_rank_mask)
    return module, module.configure_optimizers()["optimizer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print(f"embedded, float32, batch {options.batch}, rank {options.rank}, {options.rounds} rounds")
    print(f"{'pixels':>6} {'':12} {'ms':>9} {'of LoRA':>8}")
    built = {adapter: build(adapter, options.rank) for adapter in ADAPTERS}
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
