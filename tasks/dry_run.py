"""task=dry_run: print the plan of a run."""

from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal

from callbacks.progress import learning, panel
from datamodules.cached import CachedDataModule
from datamodules.errors import UserError, count_of
from datamodules.images.resizing import Size, bucket_notes
from datamodules.pairs import PairsDataModule
from datamodules.sampler import SizeBatchSampler
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.flops import CARDS, duration, matrix_peak
from tasks.footprint import Footprint, measure
from tasks.models import without_network
from tasks.terminal import log, silence_libraries


def dry_run(cfg: DictConfig, _: Path) -> None:
    """Print the memory, disk and time of the run of train.py's config, without reading weights."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        raise UserError("task=dry_run plans one run: leave -m and the lists out")
    silence_libraries()
    data = instantiate(cfg.data, _convert_="all")
    caches = isinstance(data, CachedDataModule)
    if isinstance(data, CachedDataModule) and data.shards is not None:
        raise UserError("task=dry_run plans for images: set data.root, not data.shards")
    data.sample_set.scan()  # its errors come before requests to the hub
    with without_network(cfg.model) as module:
        module.check()
        data.configure_for(module)
        log.info(f"reading the sizes of {', '.join(map(str, data.roots))}")
        data.scan()
        assert module.objective is not None
        module.objective.check_sizes(data.sizes)
        log.info(f"estimating the memory of {module.base.name}, which may take a minute or two")
        plan = measure(module, data)
        samples = cfg.callbacks.get("sample_images") is not None
        other = plan.weights - plan.offloaded if cfg.model.sampling.transformer_name_or_path is not None else 0
        images = plan.batch.size[0]
        sizes = " + ".join(f"{width}x{height}" for width, height in images)
        shown = {
            "model": f"{module.base.name} ({module.base.source.expected_precision}), {plan.parameters:,} parameters",
            "trains": f"{module.adapter}: {plan.trainable:,} parameters ({plan.trainable / plan.parameters:.2%})",
            "on": data.describe(),
            "an epoch": _epoch(data, plan.batch.limits),
            **learning(module, plan.transformer, [images[0]]),
            "time": _time(plan, data, cfg.trainer.max_steps, cfg.trainer.accumulate_grad_batches),
            "heaviest batch": f"{plan.batch.samples} of {sizes}, {plan.batch.tokens:,} tokens",
            **_memory(plan, module, caches, samples, other),
        }
    Console(stderr=True).print(panel("Retouch, dry run", shown, data.notes))


def _memory(plan: Footprint, module: EditModule, caches: bool, samples: bool, other: int) -> dict[str, str]:
    """Return the rows about memory and disk. Components that settings place on the CPU count as host memory.

    Args:
        caches: whether the data is encoded once, before training.
        samples: whether sample images are generated, for which the autoencoder stays loaded.
        other: bytes of another transformer that generates them.
    """
    places = {part: module.base.components.place(part) for part in plan.encoders}
    on_host = {part for part, place in places.items() if place is not None and place.type == "cpu"}
    encoders = {part: size for part, size in plan.encoders.items() if part not in on_host}
    texts = {part: size for part, size in encoders.items() if part != "vae"}
    vae = encoders.get("vae", 0)
    assistant = module.execution.training_adapter
    trained = {
        "weights": plan.weights - plan.offloaded + (0 if assistant is None else assistant.memory(module.base)),
        "adapter": plan.adapter,
        "optimizer": plan.optimizer,
        **({"EMA": plan.ema} if plan.ema else {}),
    }
    # auto: the least memory that it can choose.
    chosen = "full" if module.execution.checkpointing == "auto" else module.execution.checkpointing
    more = "; gradient_checkpointing=auto uses more if available" if chosen != module.execution.checkpointing else ""
    present = encoders if not caches else {"vae": vae} if samples and vae else {}  # besides the transformer
    offloads = module.base.offloads_encoders
    training = trained | {"activations": plan.activations[chosen]} | ({} if offloads else present)
    encoding = texts | ({"vae": vae, "its activations": plan.encode} if vae else {})
    # Shared prompts come first; their encoders are released before the autoencoder is loaded.
    apart = max(sum(texts.values()), vae + plan.encode)
    encoding_peak = sum(encoding.values()) if module.condition_images.text_sees_them or not caches else apart
    base = sum(trained.values())
    sampling = base + vae + plan.decode + (other if samples else 0)
    peaks = [sum(training.values()), *([encoding_peak] if caches else []), *([sampling] if samples else [])]
    peak = max([*peaks, *([base + apart] if offloads and not caches else [])])
    host = {"this process": plan.process}
    host |= {part: plan.encoders[part] for part in sorted(on_host)} | (present if offloads else {})
    host |= {"blocks": plan.offloaded} if plan.offloaded else {}
    listed = ", ".join(f"{policy} {decimal(size)}" for policy, size in plan.activations.items())
    return {
        "GPU, training": _sum(training),
        "": f"activations by gradient checkpointing: {listed}",
        "GPU, encoding": _sum(encoding, encoding_peak) if caches else "in every step, as above",
        "GPU, sampling": f"{decimal(sampling)} while an image is decoded" if samples else "no sample images",
        "host": _sum(host),
        "disk": f"cache {decimal(plan.cache)}" if caches else "no cache",
        "GPU in all": f"{decimal(peak)}, and about 1 GB for CUDA itself{more}{_against_this_machine(peak)}",
    }


def _time(plan: Footprint, data: PairsDataModule, steps: int, windows: int) -> str:
    """Return how long training takes by arithmetic, on known cards or on this machine's."""
    batches = SizeBatchSampler(data.sizes, plan.batch.limits, data.seed, repeats=data.repeats).batches_per_epoch()
    each = windows * sum(data.repeats) / batches
    cards = dict(CARDS)
    if torch.cuda.is_available():
        cards = {f"this {torch.cuda.get_device_name(0)}": matrix_peak(torch.device("cuda"))}
    took = [f"{duration(steps * each * plan.flops, peak)} on {card}" for card, peak in cards.items()]
    return f"{steps:,} steps of {each:.3g} sample{'' if each == 1 else 's'}: by arithmetic about {', '.join(took)}"


def _epoch(data: PairsDataModule, limits: dict[Size, int]) -> str:
    """Return the batches of an epoch on one process."""
    batches = SizeBatchSampler(data.sizes, limits, data.seed, repeats=data.repeats).batches_per_epoch()
    data.notes += bucket_notes(data.sizes, data.repeats, limits, data.noun)
    return f"{batches:,.0f} batches of {count_of(len(limits), 'sizes')}"


def _sum(parts: dict[str, int], total: int | None = None) -> str:
    """Write `a 1 GB + b 2 GB = 3 GB`; with another total if not all parts are in memory at once."""
    listed = " + ".join(f"{name} {decimal(size)}" for name, size in parts.items())
    all_parts = sum(parts.values())
    if total is None or total == all_parts:
        return f"{listed} = {decimal(all_parts)}"
    return f"{listed}, at most {decimal(total)} at once"


def _against_this_machine(peak: int) -> str:
    if not torch.cuda.is_available():
        return ""
    memory = torch.cuda.get_device_properties(0).total_memory
    verdict = "fits" if peak + 1e9 < memory else "does not fit: see docs/training.md, Less memory"
    return f". This machine's {torch.cuda.get_device_name(0)} has {decimal(memory)}: {verdict}"
