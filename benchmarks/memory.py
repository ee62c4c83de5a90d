"""Estimated against measured memory of a training step: `python benchmarks/memory.py`, on a GPU where there is one.

The real configurations with fewer blocks (DEPTH), so that they fit anywhere; weights are random.

    python benchmarks/memory.py [--model flux_kontext] [--depth 4] [--side 512] [--batch 1] [--dtype bfloat16]
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import open_dict
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

from datamodules.batch import LatentBatch
from foundation.catalogue import shipped_configuration
from lightning_modules import flow
from lightning_modules.estimation.flops import empty_latents
from lightning_modules.estimation.memory import FakeStep
from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.pretrained.checks import read_json

ROOT = Path(__file__).parent.parent
# What configurations call the number of blocks of a kind.
DEPTHS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")


def compose(model: str, folder: str, dtype: str, *more: str) -> Any:
    """Compose the config of train.py for a local model, with overrides `more`."""
    import train  # noqa: F401 (its resolvers)

    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = [f"model={model}", f"model.pretrained_model_name_or_path={folder}", f"model.dtype={dtype}", *more]
        cfg = hydra.compose("train", overrides=settings, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def write_shallow(
    model: str, depth: int | None, folder: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write the real configuration of a model with fewer blocks of each kind; None for all.

    Args:
        changes: the transformer's other settings that change.
    """
    import train  # noqa: F401 (its resolvers)

    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        name = hydra.compose("train", overrides=[f"model={model}"]).model.pretrained_model_name_or_path
    shipped = shipped_configuration(name)
    assert shipped is not None, f"--model {model}: assets/configurations has no {name}"
    shutil.copytree(shipped, folder, dirs_exist_ok=True)
    for path in Path(folder).glob("*/config.json"):
        new = {} if depth is None else dict.fromkeys(DEPTHS, depth)
        new |= changes if path.parent.name == "transformer" else {}
        content = read_json(path)
        path.write_text(json.dumps(content | {key: value for key, value in new.items() if key in content}))


def empty_batch(module: Any, side: int, samples: int) -> LatentBatch:
    """Build a batch of a target and, for editing models, a condition image, on the meta device."""
    pictures = ((side, side),) * (1 if module.condition_images.most == 0 else 2)
    return empty_latents(module, module.base, (pictures, ()), samples, "make it snow")


def random_batch(module: Any, side: int, samples: int, device: torch.device) -> LatentBatch:
    """Build the same batch with random values, equal on every device."""
    empty, generator = empty_batch(module, side, samples), torch.Generator().manual_seed(0)
    assert empty.target_mean is not None

    def random(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(device)

    target, *controls = map(random, (empty.target_mean, *empty.controls))
    prompt = {name: random(tensor).to(module.base.dtype) for name, tensor in empty.prompt.items()}
    names, draws = [str(number) for number in range(samples)], list(range(samples))
    return LatentBatch(names, draws, target, 0.1 * target.abs(), controls, prompt, prompt, None)


def loss(module: Any, batch: LatentBatch) -> Tensor:
    """Return the loss of a step at t = 0.5."""
    target, bf16 = batch.target_mean, module.base.dtype == torch.bfloat16
    assert target is not None
    t = torch.full((len(target),), 0.5, device=target.device)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=bf16):
        return flow.flow_loss(module.denoise(target, t, batch.controls, batch.prompt), target).mean()


def step(module: Any, batch: LatentBatch) -> None:
    """Forward and backward."""
    loss(module, batch).backward()
    module.transformer.zero_grad(set_to_none=True)


def measure(module: Any, batch: LatentBatch) -> int:
    """Return the peak of torch's additional allocations in a second step, after a warm-up."""
    step(module, batch)
    if next(batch.tensors()).is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(module, batch)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(module, batch)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def fake_step(module: Any, side: int, samples: int) -> FakeStep:
    """Return the step that `task=dry_run` simulates for this batch."""
    return FakeStep(module.execution, empty_batch(module, side, samples))


def compare(module: Any, side: int, samples: int, device: torch.device) -> Iterator[tuple[str, int, int]]:
    """Compare estimated and measured bytes of a step for each policy, without weights."""
    estimate, batch = fake_step(module, side, samples), random_batch(module, side, samples, device)
    for policy in POLICIES:
        module.execution.set_checkpointing(module.transformer, policy)
        yield policy, estimate.peak(policy), measure(module, batch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="flux_kontext")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_shallow(options.model, options.depth, folder)
        module = instantiate(compose(options.model, folder, options.dtype).model, _convert_="all")
        torch.set_default_dtype(module.base.dtype)
        with torch.device(device):
            module.transformer = type(module.base.source.meta).from_config(module.base.source.meta.config)
        torch.set_default_dtype(torch.float32)
        module.execution.adapt(module.transformer.train())
        what = f"depth {options.depth}, batch {options.batch} of {options.side}"
        print(f"{options.model}, {what}, {options.dtype}, {device}")
        for policy, estimate, measured in compare(module, options.side, options.batch, device):
            print(
                f"  gradient_checkpointing={policy:9}: estimated {estimate / 1e9:.3f} GB, "
                f"measured {measured / 1e9:.3f} GB, {estimate / measured - 1:+.1%}"
            )


if __name__ == "__main__":
    main()
