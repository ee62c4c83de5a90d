"""A step with T-LoRA, and with orthogonal T-LoRA, against one with LoRA of the same rank: alternating, in one process.

    python benchmarks/tlora_speed.py                          # the embedded model in float32
    python benchmarks/tlora_speed.py --model flux_dev --depth 2 --size 256

A step is training_step, backward and the optimizer, on latents that are at hand. Each round takes one step of each; the
figures are medians over the rounds, the ratios are taken within a round.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402, F401 (the config's resolvers)
from datamodules.batch import LatentBatch  # noqa: E402
from lightning_modules import footprint  # noqa: E402
from lightning_modules.rank_schedule import mask_forwards  # noqa: E402

ADAPTERS = ("lora", "tlora", "ortho_tlora")


def build(adapter: str, options: argparse.Namespace, folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """A module with random weights in the model's real widths, and its optimizer."""
    overrides = [f"model={options.model}", f"adapter={adapter}", f"adapter.rank={options.rank}"]
    overrides += [] if options.model == "embedded" else [f"model.pretrained_model_name_or_path={folder}"]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose("train", overrides=[*overrides, "model.dtype=float32", "model_name=x", "output_dir=x"])
    module = hydra.utils.instantiate(cfg.model, _convert_="all")
    if options.model == "embedded":
        module.configure_model()
    else:
        torch.manual_seed(0)
        module.transformer = type(module.meta_transformer()).from_config(module.meta_transformer().config)
        module.adapter.inject(module.transformer)
        module.rank_gates = module.adapter.rank_gates()
    module.set_gradient_checkpointing(module.transformer, options.checkpointing)
    mask_forwards(module.transformer, module.rank_gates, lambda: None)
    return module, module.configure_optimizers()["optimizer"]


def batch_of(module: Any, side: int, samples: int) -> LatentBatch:
    """Random latents: a target and, where the model takes one, a condition image."""
    pictures = ((side, side),) * (1 if module.condition_images.most == 0 else 2)
    empty = footprint.latents(module, (pictures, False), samples, "make it snow")
    assert empty.target_mean is not None
    random = [torch.randn(one.shape) for one in (empty.target_mean, *empty.controls)]
    prompt = {name: torch.randn(tensor.shape) for name, tensor in empty.prompt.items()}
    keys = [str(number) for number in range(samples)]
    return LatentBatch(keys, [], random[0], 0.1 * random[0].abs(), random[1:], prompt, prompt, None)


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
        if options.model != "embedded":
            write_configuration(options, Path(temporary))
        built = {adapter: build(adapter, options, Path(temporary)) for adapter in ADAPTERS}
        for side in options.size:
            batch = batch_of(built["lora"][0], side, options.batch)
            seconds: dict[str, list[float]] = {adapter: [] for adapter in ADAPTERS}
            for number in range(-5, options.rounds):
                batch.draws = list(range((number + 5) * options.batch, (number + 6) * options.batch))
                for adapter in ADAPTERS:
                    module, optimizer = built[adapter]
                    start = time.perf_counter()
                    module.training_step(batch, number).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if number >= 0:
                        seconds[adapter].append(time.perf_counter() - start)
            for adapter in ADAPTERS:
                ratio = statistics.median(a / b for a, b in zip(seconds[adapter], seconds["lora"], strict=True))
                print(f"{side:6} {adapter:12} {1000 * statistics.median(seconds[adapter]):9.2f} {ratio:8.3f}")


def write_configuration(options: argparse.Namespace, folder: Path) -> None:
    """The model's real configuration, with fewer blocks."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        target = hydra.compose(
            "train", overrides=[f"model={options.model}", "output_dir=x", "model_name=x"]
        ).model._target_
    known = [json.loads(path.read_text())["files"] for path in sorted(footprint.CONFIGURATIONS.glob("*.json"))]
    name = hydra.utils.get_class(target).pipeline_name  # type: ignore[attr-defined]
    files = next(one for one in known if one["model_index.json"]["_class_name"] == name)
    for content in files.values():
        content |= {key: options.depth for key in ("num_layers", "num_single_layers") if key in content}
    footprint.write_files(files, folder)


if __name__ == "__main__":
    main()
