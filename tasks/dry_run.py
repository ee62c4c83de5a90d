"""task=dry_run: print the plan of a run."""

import math
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
from datamodules.errors import UserError
from datamodules.images.framing import bucket_notes
from datamodules.pairs import PairsDataModule
from datamodules.sampler import SizeBatchSampler
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.activations import Heaviest
from lightning_modules.estimation.duration import CARDS, duration
from lightning_modules.estimation.flops import matrix_peak
from tasks.footprint import Footprint, measure
from tasks.models import without_network
from tasks.terminal import log, silence_libraries


def dry_run(cfg: DictConfig, _: Path) -> None:
    """Print what the run of train.py's config will need, without reading weights."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        raise UserError("task=dry_run plans one run: leave -m and the lists out")
    silence_libraries()
    data = instantiate(cfg.data, _convert_="all")
    caches = isinstance(data, CachedDataModule)
    if not isinstance(data, PairsDataModule) or (isinstance(data, CachedDataModule) and data.shards is not None):
        raise UserError("task=dry_run plans for pictures: set data.root, not data.shards")
    data.sample_set.scan()  # what is wrong with it comes before questions to the hub
    with without_network(cfg.model) as module:
        module.check()
        data.configure_for(module)
        log.info(f"reading the sizes of {', '.join(map(str, data.roots))}")
        data.scan()
        assert module.objective is not None
        module.objective.check_sizes(data.sizes)
        log.info(f"working out what {module.base.name} takes, which may be a minute or two")
        plan = measure(module, data)
        sampler = cfg.callbacks.get("sample_images")
        another = sampler is not None and cfg.model.sampling.transformer_name_or_path is not None
        beside = plan.weights - plan.waiting if another else 0
        shown = rows(plan, module, data, cfg.trainer, caches, sampler is not None, beside)
    Console(stderr=True).print(panel("Retouch, dry run", shown, data.notes))


def rows(
    plan: Footprint,
    module: EditModule,
    data: PairsDataModule,
    trainer: DictConfig,
    caches: bool,
    samples: bool,
    another: int,
) -> dict[str, str]:
    """The plan by its parts. Parts that settings place on the CPU count with the host's memory.

    Args:
        trainer: its settings.
        caches: whether the data is encoded once, before the training.
        samples: whether sample pictures are made, for which the autoencoder stays loaded.
        another: bytes of the transformer that makes them beside the one that trains.
    """
    adapter = module.adapter
    assert adapter is not None
    places = {part: module.base.components.place(part) for part in plan.encoders}
    on_host = {part for part, place in places.items() if place is not None and place.type == "cpu"}
    encoders = {part: size for part, size in plan.encoders.items() if part not in on_host}
    texts = {part: size for part, size in encoders.items() if part != "vae"}
    vae = encoders.get("vae", 0)
    chosen, more = module.execution.checkpointing, ""
    if chosen == "auto":  # the least memory that it can settle for
        chosen, more = "full", "; gradient_checkpointing=auto takes more where there is more"
    offloaded = module.base.offloads_encoders  # to the host, while the transformer computes
    weights = plan.weights - plan.waiting
    assistant = module.execution.training_adapter
    training = {
        "weights": weights + (0 if assistant is None else assistant.memory(module.base)),
        "adapter": plan.adapter,
        "optimizer": plan.optimizer,
        **({"EMA": plan.ema} if plan.ema else {}),
        "activations": plan.activations[chosen],
    }
    beside = encoders if not caches else {"vae": vae} if samples and vae else {}
    if not offloaded:
        training |= beside
    encoding = texts | ({"vae": vae, "its activations": plan.encode} if vae else {})
    # Prompts that are shared come first, and their encoders go before the autoencoder comes.
    together = module.condition_images.text_sees_them or not caches
    encoding_peak = sum(encoding.values()) if together else max(sum(texts.values()), vae + plan.encode)
    trained = training["weights"] + plan.adapter + plan.optimizer + plan.ema
    decoding = trained + vae + plan.decode + another
    # Each step encodes before it computes: pictures, then prompts.
    stepwise = trained + max(sum(texts.values()), vae + plan.encode) if offloaded and not caches else 0
    images, _ = plan.batch.size
    pictures = " + ".join(f"{width}x{height}" for width, height in images)
    peak = max(sum(training.values()), encoding_peak if caches else 0, decoding if samples else 0, stepwise)
    host = {"this process": plan.process, "prompts while encoding": plan.prompts, "reading ahead": plan.read_ahead}
    host |= {part: plan.encoders[part] for part in sorted(on_host)}
    host |= {"blocks": plan.waiting} if plan.waiting else {}
    host |= beside if offloaded else {}
    disk = {"cache": plan.cache} if caches else {}
    if not caches:
        del host["prompts while encoding"], host["reading ahead"]
    return {
        "model": f"{module.base.name} ({plan.precision}), {plan.parameters:,} parameters",
        "trains": f"{adapter}: {plan.trainable:,} parameters ({plan.trainable / plan.parameters:.2%})",
        "on": data.describe(),
        "an epoch": _epoch(data, plan.batch),
        **learning(module, module.base.source.meta, [images[0]]),
        "time": _time(plan, data, trainer.max_steps, trainer.accumulate_grad_batches),
        "heaviest batch": f"{plan.batch.samples} of {pictures}, {plan.batch.tokens:,} tokens",
        "GPU, training": _sum(training),
        "": "activations by gradient checkpointing: "
        + ", ".join(f"{policy} {decimal(size)}" for policy, size in plan.activations.items()),
        "GPU, encoding": _sum(encoding, encoding_peak) if caches else "in every step, as above",
        "GPU, sampling": f"{decimal(decoding)} while a picture is decoded" if samples else "no sample pictures",
        "host": _sum(host),
        "host, loading": f"at most {decimal(plan.process + plan.loading[0])} while the transformer goes to a GPU, "
        f"{decimal(plan.process + plan.loading[1])} where it stays in the host's memory",
        "disk": ", ".join(f"{part} {decimal(size)}" for part, size in disk.items()) or "no cache",
        "GPU in all": f"{decimal(peak)}, and about 1 GB for CUDA itself{more}{_against_this_machine(peak)}",
    }


def _time(plan: Footprint, data: PairsDataModule, steps: int, windows: int) -> str:
    """Return how long training takes by arithmetic, on known cards or on this machine's."""
    batches = SizeBatchSampler(data.sizes, plan.batch.limits, data.seed, repeats=data.repeats).batches_per_epoch()
    each = windows * sum(data.repeats) / batches
    cards = dict(CARDS)
    if torch.cuda.is_available():
        cards = {f"this {torch.cuda.get_device_name(0)}": matrix_peak(torch.device("cuda"))}
    flops = steps * each * plan.flops
    took = [f"{duration(flops, peak)} on {card}" for card, peak in cards.items()]
    return f"{steps:,} steps of {each:.3g} sample{'' if each == 1 else 's'}: by arithmetic about {', '.join(took)}"


def _epoch(data: PairsDataModule, heaviest: Heaviest) -> str:
    """Its batches on one process, how much of the token budget they use, and what is cropped away."""
    limits, budget = heaviest.limits, data.max_tokens_per_batch
    batches = SizeBatchSampler(data.sizes, limits, data.seed, repeats=data.repeats).batches_per_epoch()
    data.notes += bucket_notes(data.sizes, data.repeats, limits, data.noun)
    pixels = [math.prod(view.windows[0].frame) for view in data.views]
    cropped = sum(view.cropped * count for view, count in zip(data.views, pixels, strict=True)) / sum(pixels)
    used = ""
    if budget is not None:
        tokens = sum(heaviest.tokens_of[size] * n for size, n in zip(data.sizes, data.repeats, strict=True))
        used = f", which use {100 * tokens / (batches * budget):.0f} % of max_tokens_per_batch={budget:,}"
    sizes = f"{len(limits)} size{'' if len(limits) == 1 else 's'}"
    return f"{batches:,.0f} batches of {sizes}{used}; {100 * cropped:.1f} % of the pixels cropped away"


def _sum(parts: dict[str, int], total: int | None = None) -> str:
    """`a 1 GB + b 2 GB = 3 GB`; another total where parts are not there at once."""
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
