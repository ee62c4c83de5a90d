"""Estimated against measured memory of a training step: `python benchmarks/memory.py`, on a GPU where there is one.

The real configurations with fewer blocks (DEPTH), so that they fit anywhere; weights are random.

    python benchmarks/memory.py [--model flux_kontext] [--depth 4] [--side 512] [--batch 1] [--dtype bfloat16]
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import open_dict

from datamodules.batch import LatentBatch
from lightning_modules import flow
from lightning_modules.adapters.adapter import trainable
from lightning_modules.estimation.activations import FakeStep, empty_latents
from lightning_modules.execution.checkpointing import POLICIES, set_checkpointing
from tasks import footprint

ROOT = Path(__file__).parent.parent


def compose(model: str, folder: str, dtype: str, *more: str) -> Any:
    """The config of train.py for a local model; `more` overrides."""
    import train  # noqa: F401 (its resolvers)

    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        settings = [f"model={model}", f"model.pretrained_model_name_or_path={folder}", f"model.dtype={dtype}", *more]
        cfg = hydra.compose("train", overrides=settings, return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def write_shallow(model: str, depth: int | None, folder: str) -> None:
    """The real configuration of a model, with fewer blocks of each kind; None for all."""
    family: Any = hydra.utils.get_class(compose(model, "x", "float32").model._target_)
    known = [json.loads(path.read_text())["files"] for path in sorted(footprint.CONFIGURATIONS.glob("*.json"))]
    files = next(one for one in known if one["model_index.json"]["_class_name"] == family.pipeline_name)
    for content in files.values() if depth is not None else ():
        content |= {key: depth for key in ("num_layers", "num_single_layers") if key in content}
    footprint.write_files(files, Path(folder))


def empty_batch(module: Any, side: int, samples: int) -> LatentBatch:
    """A target and, where the model takes one, a condition image, on the meta device."""
    pictures = ((side, side),) * (1 if module.condition_images.most == 0 else 2)
    return empty_latents(module, module.base, (pictures, False), samples, "make it snow")


def step(module: Any, batch: LatentBatch, device: torch.device) -> None:
    """Forward and backward on random numbers."""
    assert batch.target_mean is not None
    images = [torch.randn(image.shape, device=device) for image in (batch.target_mean, *batch.controls)]
    prompt = {name: torch.randn(x.shape, device=device).to(module.base.dtype) for name, x in batch.prompt.items()}
    t = torch.rand(len(images[0]), device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=module.base.dtype == torch.bfloat16):
        velocity = module.velocity(module.transformer, images[0], t, images[1:], prompt)
        flow.flow_loss(velocity, images[0]).mean().backward()
    for parameter in trainable(module.transformer).values():
        parameter.grad = None


def measure(module: Any, batch: LatentBatch, device: torch.device) -> int:
    """The most that torch allocates in a second step (libraries warmed up) beside what there is."""
    step(module, batch, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(module, batch, device)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(module, batch, device)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


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
        cfg = compose(options.model, folder, options.dtype)
        estimating, module = instantiate(cfg.model, _convert_="all"), instantiate(cfg.model, _convert_="all")
        batch = empty_batch(estimating, options.side, options.batch)
        adapted = estimating.execution.adapted_meta_transformer()
        step = FakeStep(estimating, estimating.adapter, estimating.base.dtype, False, adapted, batch)
        torch.set_default_dtype(module.base.dtype)
        with torch.device(device):
            module.transformer = type(module.base.source.meta).from_config(module.base.source.meta.config)
        torch.set_default_dtype(torch.float32)
        module.execution.adapt(module.transformer.train())
        what = f"depth {options.depth}, batch {options.batch} of {options.side}"
        print(f"{options.model}, {what}, {options.dtype}, {device}")
        for policy in POLICIES:
            estimate = step.peak(policy)
            set_checkpointing(module.transformer, policy, module.adapter.bind_rank_mask)
            measured = measure(module, batch, device)
            print(
                f"  gradient_checkpointing={policy:9}: estimated {estimate / 1e9:.3f} GB, "
                f"measured {measured / 1e9:.3f} GB, {estimate / measured - 1:+.1%}"
            )


if __name__ == "__main__":
    main()
